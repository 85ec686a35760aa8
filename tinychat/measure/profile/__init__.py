"""The profile of a decode step: time per op, compared with the memory limit, and red flags."""

from tinychat.measure.profile.measure import kernels, profile
from tinychat.measure.profile.report import Profile
from tinychat.measure.profile.view import view

__all__ = ["Profile", "kernels", "profile", "view"]
