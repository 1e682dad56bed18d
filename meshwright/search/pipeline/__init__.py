"""The search over pipelines: numbers of stages, schedules, and which layers go where."""
