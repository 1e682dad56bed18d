"""What a plan costs on a cluster: seconds of operators and collectives, bytes of memory, and the timeline of a step."""
