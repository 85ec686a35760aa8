"""Where the time of a token goes, against the memory limit, and what is wrong with it."""

from tinychat.measure.profile.measure import kernels, profile
from tinychat.measure.profile.report import Profile
from tinychat.measure.profile.view import view

__all__ = ["Profile", "kernels", "profile", "view"]
