"""What a put costs, how fast it is replicated and restored, beside what the machine can do. See README.md."""
