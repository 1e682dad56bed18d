"""What a step of a program takes on a cluster, predicted without running it: tasks, timeline, seconds, bytes."""
