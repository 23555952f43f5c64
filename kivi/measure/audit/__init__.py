"""The audit: whether a cache is what its spec says and holds the bytes that it reports.

:func:`audit_spec` audits one of the project's caches, :func:`audit` any cache, :mod:`kivi.measure.audit.cell` those of a cell.
"""

from kivi.measure.audit.checks import CHECK_NAMES, CHECKS, QUALITY, QUALITY_QUESTION, audit, audit_spec, check_names
from kivi.measure.audit.decode_length import DecodeSettings, Reading
from kivi.measure.audit.report import AuditReport, AuditSettings, Check, CheckFinding, Curve, Notes
from kivi.measure.audit.subject import Subject, subject_of

__all__ = [
    "CHECKS",
    "CHECK_NAMES",
    "QUALITY",
    "QUALITY_QUESTION",
    "AuditReport",
    "AuditSettings",
    "Check",
    "CheckFinding",
    "Curve",
    "DecodeSettings",
    "Notes",
    "Reading",
    "Subject",
    "audit",
    "audit_spec",
    "check_names",
    "subject_of",
]
