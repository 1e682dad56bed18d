"""Pipelines: schedules as lists of actions, checked and drawn before anything runs."""

from meshwright.pipeline.actions import Action, Schedule, with_messages
from meshwright.pipeline.play import Played, play
from meshwright.pipeline.schedules import SCHEDULES, make

__all__ = ["SCHEDULES", "Action", "Played", "Schedule", "make", "play", "with_messages"]
