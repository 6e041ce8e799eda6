"""Facade: the published path of `openenv.env.manifest`. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.env.manifest import CapabilitiesSpec as CapabilitiesSpec
    from openenv.env.manifest import JudgePin as JudgePin
    from openenv.env.manifest import ManifestError as ManifestError
    from openenv.env.manifest import NetworkPolicy as NetworkPolicy
    from openenv.env.manifest import OracleDeclaration as OracleDeclaration
    from openenv.env.manifest import ResourceDeclaration as ResourceDeclaration
    from openenv.env.manifest import RewardDeclaration as RewardDeclaration
    from openenv.env.manifest import TaskDistributionPin as TaskDistributionPin
    from openenv.env.manifest import VerifierBinding as VerifierBinding
    from openenv.packaging.validate.graders import ENTRY_POINT_GROUP as ENTRY_POINT_GROUP
    from openenv.packaging.validate.graders import Grader as Grader
    from openenv.packaging.validate.graders import GraderRegistry as GraderRegistry
    from openenv.packaging.validate.graders import Subject as Subject
    from openenv.packaging.validate.manifest import UNSUPPORTED_CATEGORIES as UNSUPPORTED_CATEGORIES
    from openenv.packaging.validate.manifest import WELL_KNOWN_FILES as WELL_KNOWN_FILES
    from openenv.packaging.validate.manifest import NormalizedManifest as NormalizedManifest
    from openenv.packaging.validate.manifest import Parser as Parser
    from openenv.packaging.validate.manifest import ParserRegistry as ParserRegistry
    from openenv.packaging.validate.manifest import SignatureError as SignatureError
    from openenv.packaging.validate.manifest import TypeSpec as TypeSpec
    from openenv.packaging.validate.manifest import UnsupportedPackageError as UnsupportedPackageError
    from openenv.packaging.validate.manifest import detect_signature as detect_signature
    from openenv.packaging.validate.policy import DeclarationBounds as DeclarationBounds
    from openenv.packaging.validate.policy import PolicyEntry as PolicyEntry
    from openenv.packaging.validate.policy import PolicyError as PolicyError
    from openenv.packaging.validate.policy import SeverityPolicy as SeverityPolicy
    from openenv.packaging.validate.policy import apply_policy as apply_policy
    from openenv.packaging.validate.policy import load_policy as load_policy
    from openenv.packaging.validate.report import CheckResult as CheckResult
    from openenv.packaging.validate.report import ValidationReport as ValidationReport
    from openenv.packaging.validate.report import write_report as write_report
    from openenv.packaging.validate.rules import CheckStatus as CheckStatus
    from openenv.packaging.validate.rules import Lane as Lane
    from openenv.packaging.validate.rules import Level as Level
    from openenv.packaging.validate.rules import ProviderCapability as ProviderCapability
    from openenv.packaging.validate.rules import Severity as Severity
    from openenv.packaging.validate.rules import SignatureKind as SignatureKind
    from openenv.packaging.validate.rules import Verdict as Verdict
    from openenv.packaging.validate.runner import run_validation as run_validation
    from openenv.packaging.validate.served_package import RunningSubject as RunningSubject
    from openenv.packaging.validate.served_package import ValidationProvider as ValidationProvider
    from openenv.sandboxes.base import ExecResult as ExecResult

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        by_module(
            {
                "openenv.env.manifest": """
                CapabilitiesSpec JudgePin ManifestError NetworkPolicy OracleDeclaration
                ResourceDeclaration RewardDeclaration TaskDistributionPin VerifierBinding
            """,
                "openenv.packaging.validate.graders": "ENTRY_POINT_GROUP Grader GraderRegistry Subject",
                "openenv.packaging.validate.manifest": """
                NormalizedManifest Parser ParserRegistry SignatureError TypeSpec
                UNSUPPORTED_CATEGORIES UnsupportedPackageError WELL_KNOWN_FILES detect_signature
            """,
                "openenv.packaging.validate.policy": """
                DeclarationBounds PolicyEntry PolicyError SeverityPolicy apply_policy load_policy
            """,
                "openenv.packaging.validate.report": "CheckResult ValidationReport write_report",
                "openenv.packaging.validate.rules": """
                CheckStatus Lane Level ProviderCapability Severity SignatureKind Verdict
            """,
                "openenv.packaging.validate.runner": "run_validation",
                "openenv.packaging.validate.served_package": "RunningSubject ValidationProvider",
                "openenv.sandboxes.base": "ExecResult",
            }
        ),
    )
