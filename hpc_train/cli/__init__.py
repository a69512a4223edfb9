"""What a person types. No torch: what needs it runs in a child process."""
