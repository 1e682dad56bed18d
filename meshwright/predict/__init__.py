"""Predict a step of a program on a cluster without running it: tasks, timeline, seconds and bytes."""
