"""What a gradient adds to the residual, and what is kept of it: plain, with momentum, or low-pass filtered."""

from gradsieve.feedback.low_pass import LowPass
from gradsieve.feedback.momentum import Momentum
from gradsieve.feedback.plain import Feedback, Plain

__all__ = ["Feedback", "LowPass", "Momentum", "Plain"]
