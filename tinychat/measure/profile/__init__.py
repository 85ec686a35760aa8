"""Why a model is as fast as it is: where the time of a token goes, against the memory limit, and what is wrong with
it."""

from tinychat.measure.profile.measure import kernels, profile
from tinychat.measure.profile.report import Report
from tinychat.measure.profile.view import view

__all__ = ["Report", "kernels", "profile", "view"]
