"""What runs in a worker besides recording: its way into process groups, its milestones, its connections."""
