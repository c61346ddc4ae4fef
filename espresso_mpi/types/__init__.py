"""The values that describe a synchronisation: ``tensors``, ``routes`` with their steps, ``plans`` with strategies.

May import: ``feedback``, ``timetable``, ``files`` and what is below them. All are frozen. Their names are taken from
here; a new one goes on the list below.
"""

from .plans import Forecast, MadeFor, Order, Outlook, Plan, Strategy, buffer_name
from .routes import (
    CLOSING,
    ROUTES,
    SUMS,
    Collective,
    Decode,
    Encode,
    Level,
    Op,
    Route,
    RouteStep,
)
from .tensors import ALIGN, ITEMSIZE, DeviceKind, TensorSpec

__all__ = [
    "ALIGN",
    "CLOSING",
    "ITEMSIZE",
    "ROUTES",
    "SUMS",
    "Collective",
    "Decode",
    "DeviceKind",
    "Encode",
    "Forecast",
    "Level",
    "MadeFor",
    "Op",
    "Order",
    "Outlook",
    "Plan",
    "Route",
    "RouteStep",
    "Strategy",
    "TensorSpec",
    "buffer_name",
]
