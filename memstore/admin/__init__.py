"""What an operator calls: start and stop a store, list stores."""
