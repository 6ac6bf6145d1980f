"""Env profiles: sets of environment variables for the ranks, each with its reason, its cost and its origin."""

from __future__ import annotations

from saferun.env.profiles.profile_values import Cost, EnvVariable, Profile, Resolution, Variable, Vendor
from saferun.env.profiles.resolution import render, resolve
from saferun.env.profiles.search import ProfileSet, default_search_path, load_profiles, user_directory

__all__ = [
    "Cost",
    "EnvVariable",
    "Profile",
    "ProfileSet",
    "Resolution",
    "Variable",
    "Vendor",
    "default_search_path",
    "load_profiles",
    "render",
    "resolve",
    "user_directory",
]
