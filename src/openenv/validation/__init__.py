"""What `openenv validate` checks: the files of a package, how it behaves when it is served, and a running server.

Knows environments from outside, as a client sees them, and the process or container of a server that it started itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

_EXPORTS = by_module(
    {
        "openenv.validation.graders": "ENTRY_POINT_GROUP Grader GraderRegistry Subject",
        "openenv.validation.manifest": (
            "CapabilitiesSpec JudgePin ManifestError NetworkPolicy NormalizedManifest OracleDeclaration"
            " ResourceDeclaration RewardDeclaration TaskDistributionPin TypeSpec VerifierBinding"
        ),
        "openenv.validation.parsers": "Parser ParserRegistry",
        "openenv.validation.policy": (
            "DeclarationBounds PolicyEntry PolicyError SeverityPolicy apply_policy load_policy"
        ),
        "openenv.validation.providers": "ExecResult RunningSubject ValidationProvider",
        "openenv.validation.report": "CheckResult ValidationReport write_report",
        "openenv.validation.runner": "run_validation",
        "openenv.validation.signature": (
            "SignatureError UNSUPPORTED_CATEGORIES UnsupportedPackageError WELL_KNOWN_FILES detect_signature"
        ),
        "openenv.validation.types": "CheckStatus Lane Level ProviderCapability Severity SignatureKind Verdict",
    }
)

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.validation.graders import ENTRY_POINT_GROUP as ENTRY_POINT_GROUP
    from openenv.validation.graders import Grader as Grader
    from openenv.validation.graders import GraderRegistry as GraderRegistry
    from openenv.validation.graders import Subject as Subject
    from openenv.validation.manifest import CapabilitiesSpec as CapabilitiesSpec
    from openenv.validation.manifest import JudgePin as JudgePin
    from openenv.validation.manifest import ManifestError as ManifestError
    from openenv.validation.manifest import NetworkPolicy as NetworkPolicy
    from openenv.validation.manifest import NormalizedManifest as NormalizedManifest
    from openenv.validation.manifest import OracleDeclaration as OracleDeclaration
    from openenv.validation.manifest import ResourceDeclaration as ResourceDeclaration
    from openenv.validation.manifest import RewardDeclaration as RewardDeclaration
    from openenv.validation.manifest import TaskDistributionPin as TaskDistributionPin
    from openenv.validation.manifest import TypeSpec as TypeSpec
    from openenv.validation.manifest import VerifierBinding as VerifierBinding
    from openenv.validation.parsers import Parser as Parser
    from openenv.validation.parsers import ParserRegistry as ParserRegistry
    from openenv.validation.policy import DeclarationBounds as DeclarationBounds
    from openenv.validation.policy import PolicyEntry as PolicyEntry
    from openenv.validation.policy import PolicyError as PolicyError
    from openenv.validation.policy import SeverityPolicy as SeverityPolicy
    from openenv.validation.policy import apply_policy as apply_policy
    from openenv.validation.policy import load_policy as load_policy
    from openenv.validation.providers import ExecResult as ExecResult
    from openenv.validation.providers import RunningSubject as RunningSubject
    from openenv.validation.providers import ValidationProvider as ValidationProvider
    from openenv.validation.report import CheckResult as CheckResult
    from openenv.validation.report import ValidationReport as ValidationReport
    from openenv.validation.report import write_report as write_report
    from openenv.validation.runner import run_validation as run_validation
    from openenv.validation.signature import UNSUPPORTED_CATEGORIES as UNSUPPORTED_CATEGORIES
    from openenv.validation.signature import WELL_KNOWN_FILES as WELL_KNOWN_FILES
    from openenv.validation.signature import SignatureError as SignatureError
    from openenv.validation.signature import UnsupportedPackageError as UnsupportedPackageError
    from openenv.validation.signature import detect_signature as detect_signature
    from openenv.validation.types import CheckStatus as CheckStatus
    from openenv.validation.types import Lane as Lane
    from openenv.validation.types import Level as Level
    from openenv.validation.types import ProviderCapability as ProviderCapability
    from openenv.validation.types import Severity as Severity
    from openenv.validation.types import SignatureKind as SignatureKind
    from openenv.validation.types import Verdict as Verdict

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
