"""Drills: scripted faults with a promised outcome, proved on the bytes. Read README.md beside this file first."""
