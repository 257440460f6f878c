"""Filters: which messages a queue holds, and with what priority (RFC 0005).

``Filter.parse(text)`` is the way in. ``opendata_queue.filters.arrow`` has the back end for
batches and needs ``pyarrow``; all else does not.
"""

from opendata_queue.filters.compiled import PriorityFunction
from opendata_queue.filters.errors import FilterError
from opendata_queue.filters.filter import Filter
from opendata_queue.filters.index import Evaluation, FilterIndex
from opendata_queue.filters.nodes import (
    And,
    Between,
    Boolean,
    Comparison,
    Condition,
    Exists,
    Field,
    Header,
    In,
    Like,
    Literal,
    Not,
    Number,
    Operator,
    Or,
    Predicate,
    Rule,
    SystemField,
    SystemFields,
    Text,
)
from opendata_queue.filters.validation import (
    MAX_DEPTH,
    MAX_NODES,
    MAX_PATTERN_CHARACTERS,
    MAX_SEARCHES,
    MAX_TEXT_BYTES,
)
from opendata_queue.filters.values import DEFAULT_PRIORITY, MAX_PRIORITY, PRIORITY_HEADER

__all__ = [
    "DEFAULT_PRIORITY",
    "MAX_DEPTH",
    "MAX_NODES",
    "MAX_PATTERN_CHARACTERS",
    "MAX_PRIORITY",
    "MAX_SEARCHES",
    "MAX_TEXT_BYTES",
    "PRIORITY_HEADER",
    "And",
    "Between",
    "Boolean",
    "Comparison",
    "Condition",
    "Evaluation",
    "Exists",
    "Field",
    "Filter",
    "FilterError",
    "FilterIndex",
    "Header",
    "In",
    "Like",
    "Literal",
    "Not",
    "Number",
    "Operator",
    "Or",
    "Predicate",
    "PriorityFunction",
    "Rule",
    "SystemField",
    "SystemFields",
    "Text",
]
