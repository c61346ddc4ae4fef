"""The values that describe a synchronisation. All are frozen.

- ``tensors``: tensors and their devices.
- ``routes``: routes and their steps.
- ``plans``: strategies, plans and predictions.

May import: ``feedback``, ``timetable``, ``files`` and the layers below them. Other folders import the names from here;
a new name goes on the list below.
"""

from .plans import Chosen, Forecast, MadeFor, Order, Outlook, Plan, Strategy, buffer_name
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
    "Chosen",
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
