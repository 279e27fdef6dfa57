"""Texts shared by the scripted model and the checks of coding agents. This module needs only the standard library."""

from __future__ import annotations

COMMAND = "echo carousel-$((40+2))"  # called by the model
RESULT = "carousel-42"  # output of the command
ANSWER = "The shell has answered."  # the model's answer after the result, or without tools
