"""What an operator calls: start and stop a store, fork a job, list stores."""
