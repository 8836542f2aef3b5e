"""What several of our tasks share."""
