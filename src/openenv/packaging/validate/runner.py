"""Validate a package: check its files, serve it, check its behaviour, and write the report."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from openenv.env.manifest import ManifestError
from openenv.errors import ProviderError, message_of
from openenv.server.folders import FolderApp

from . import checks_behaviour, checks_files
from .graders import (
    Grader,
    GraderRegistry,
    NetworkPolicyGrader,
    ObservationSchemaGrader,
    RewardWellFormedGrader,
    StateContractGrader,
    StaticManifestGrader,
    Subject,
    execute_graders,
)
from .manifest import NormalizedManifest, NormalizedManifestV2, OpenEnvYamlParser, ParserRegistry, detect_signature
from .policy import PolicyError, SeverityPolicy, apply_policy, load_policy
from .probe import Probe, last_line
from .recording import RuntimeEvidence, RuntimePlan, collect_runtime_evidence
from .report import (
    UNMET,
    CheckOutcome,
    ValidationReport,
    ValidationReportV2,
    skipped,
    source_digest,
    write_runtime_bundle,
)
from .rules import (
    RULE,
    RULES,
    CheckEvidence,
    CheckFailed,
    CheckSkipped,
    CheckStatus,
    Level,
    Rule,
    SignatureKind,
    ValidationLane,
)
from .served_package import NotServed, PackageServer, ProvidedPackage, ServedPackage, ValidationProvider

Listener = Callable[[CheckOutcome], None]
REPORT_SCHEMA_VERSION: Literal["1"] = "1"
_STATIC_MANIFEST = StaticManifestGrader.check_id
_STARTUP = "runtime.startup"
_NETWORK = NetworkPolicyGrader.check_id
# For files without a manifest, which declare no limit.
_REPLY_S = 60.0


def default_parser_registry() -> ParserRegistry:
    """Return the parsers of the kinds of packages that can be validated."""
    registry = ParserRegistry()
    registry.register(OpenEnvYamlParser())
    return registry


def default_grader_registry(policy: SeverityPolicy) -> GraderRegistry:
    """Return our graders, with the bounds of a policy."""
    registry = GraderRegistry()
    registry.register(StaticManifestGrader(policy.bounds))
    graders: tuple[Grader, ...] = (
        RewardWellFormedGrader(),
        ObservationSchemaGrader(),
        StateContractGrader(),
        NetworkPolicyGrader(),
    )
    for grader in graders:
        registry.register(grader)
    return registry


def run_validation(
    target: Path,
    *,
    max_level: Level = Level.SEMANTIC,
    skip_build: bool = False,
    policy: SeverityPolicy | None = None,
    provider: ValidationProvider | None = None,
    artifacts_dir: Path | None = None,
    token: str | None = None,
    listen: Listener | None = None,
) -> ValidationReport | ValidationReportV2:
    """Validate a package and return the report.

    Args:
        target: The package's folder, or a Python file with an environment.
        max_level: The last level of checks.
        skip_build: Whether to leave out checks that need the package to run.
        policy: The severity of each check; by default v1 for files alone, else v2.
        provider: Builds and runs the package; by default a process of this machine serves it.
        artifacts_dir: The folder for the report, the plan and every message of an episode.
        token: The token for the package's server, if a process serves it.
        listen: Called with each result as it comes.

    Raises:
        SignatureError: The folder contains no package, or packages of two kinds.
        UnsupportedPackageError: No parser reads this kind of package.
        PolicyError: The policy is not for this level, or does not know a check that a grader makes.
    """
    # Accept a plain number, as published callers pass it.
    level = Level(max_level)
    chosen = policy or load_policy("v1" if level is Level.STATIC else "v2")
    entries = chosen.entries_for_lane(ValidationLane.LOCAL)
    # Policy v1 knows no checks of behaviour; their results would have no severity.
    if level > Level.STATIC and _STARTUP not in entries:
        raise PolicyError(f"the rules {chosen.policy_version} are for --level static; runtime and semantic need v2")
    is_file = target.is_file() and target.suffix == ".py"
    app = None if is_file else checks_files.app_of(target)
    root = target if app is None else app.folder
    # An application without a manifest can be served, so its checks run; only the manifest's check fails.
    is_bare = app is not None and not any((root / kind.value).is_file() for kind in SignatureKind)
    signature = SignatureKind.OPENENV_SERVED if is_file or is_bare else detect_signature(root)
    # The package's server starts in another folder, so a relative path would point to the wrong place.
    run = _PackageRun(root.resolve(), level, chosen, declares=not is_file, token=token, listen=listen, app=app)
    # A single file declares nothing, and its checks run anyway.
    if not is_file:
        try:
            run.manifest = default_parser_registry().parser_for(signature).parse(root)
        except ManifestError as error:
            run.manifest_error = error
    run.load_graders()
    # Graders may write files even if the caller keeps none.
    with tempfile.TemporaryDirectory(prefix="openenv-validate-") as scratch:
        run.outputs_dir = artifacts_dir or Path(scratch)
        run.check_files()
        if level > Level.STATIC:
            run.check_behaviour(skip_build=skip_build, provider=provider, record=artifacts_dir is not None)
        report = _report(run, signature, str(target))
        if artifacts_dir is not None:
            described = None if provider is None else {"name": provider.name, "image_ref": run.image_ref}
            write_runtime_bundle(
                artifacts_dir,
                report,
                plan=run.plan,
                evidence=run.evidence,
                provider=described,
                cleanup=run.cleanup,
            )
    return report


def _report(run: _PackageRun, signature: SignatureKind, target: str) -> ValidationReport | ValidationReportV2:
    lane = ValidationLane.LOCAL
    entries = run.policy.entries_for_lane(lane)
    # Levels with at least one check that really ran.
    levels = {
        RULE[result.check_id].level if result.check_id in RULE else entries[result.check_id].level
        for result in run.results
        if result.status is not CheckStatus.SKIP and (result.check_id in RULE or result.check_id in entries)
    }
    fields: dict[str, Any] = {
        "target": target,
        "source_digest": source_digest(run.target),
        "signature": signature,
        "manifest": run.manifest,
        "policy_version": run.policy.policy_version,
        "lane": lane,
        "levels_run": sorted(levels | {Level.STATIC}),
        "results": run.results,
        "verdict": apply_policy(run.results, run.policy, lane),
    }
    if run.level > Level.STATIC or isinstance(run.manifest, NormalizedManifestV2):
        return ValidationReportV2(report_schema_version="2", **fields)
    return ValidationReport(report_schema_version=REPORT_SCHEMA_VERSION, **fields)


@dataclass
class _PackageRun:
    """One validation: the package's data so far, and the results."""

    target: Path
    level: Level
    policy: SeverityPolicy
    declares: bool  # whether there could be a manifest: a file has none
    token: str | None
    listen: Listener | None
    app: FolderApp | None  # None if the folder has no application, or it cannot be found
    # Filled in order: manifest, files, server, evidence.
    manifest: NormalizedManifest | None = None
    manifest_error: ManifestError | None = None
    outputs_dir: Path = Path()
    results: list[CheckOutcome] = field(default_factory=list)
    plan: RuntimePlan | None = None
    evidence: RuntimeEvidence | None = None
    network_evidence: str | None = None
    image_ref: str | None = None
    cleanup: dict[str, Any] | None = None
    _others: list[Grader] = field(default_factory=list)  # graders of other packages
    _served: PackageServer | None = None

    def load_graders(self) -> None:
        """Find the graders of other packages; one of theirs replaces a check of ours with the same id."""
        # Our graders run as checks of ours; here they only show which IDs are taken.
        own = default_grader_registry(self.policy)
        registry = GraderRegistry()
        registry.load_entry_points()
        if self.manifest is not None:
            graders = registry.select(self.manifest, self.level)
            self._others = [grader for grader in graders if own.get(grader.check_id) is None]

    def add(self, result: CheckOutcome) -> None:
        """Keep a result."""
        self.results.append(result)
        if self.listen is not None:
            self.listen(result)

    def _rules(self, *levels: Level) -> list[Rule]:
        """Return our checks at some levels, without checks of features that the package lacks."""
        replaced = {grader.check_id for grader in self._others}
        # A grader of another package replaces our check with the same ID.
        at_level = [rule for rule in RULES if rule.level in levels and rule.level <= self.level]
        return [rule for rule in at_level if rule.id not in replaced and _applies(rule, self.manifest)]

    def check_files(self) -> None:
        """Check the package's files. A single file is not a package, so these checks are skipped for it."""
        functions = {
            "static.layout": lambda: checks_files.layout(self.target, self.app),
            "static.entry_point": lambda: checks_files.entry_point(self.target, self.app),
        }
        for rule in self._rules(Level.STATIC):
            if not self.declares:
                self.add(skipped(rule.id, "a file declares nothing", applies=False))
            elif rule.id == _STATIC_MANIFEST:
                self.add(self._manifest_result())
            else:
                self.add(checks_behaviour.outcome_of(rule.id, functions[rule.id]))
        self._run_others(Level.STATIC)

    def _manifest_result(self) -> CheckOutcome:
        if self.manifest is not None:
            return StaticManifestGrader(self.policy.bounds).run(self._subject(self.manifest))
        # Without a manifest there is always the error of reading it.
        assert self.manifest_error is not None
        return CheckOutcome(
            check_id=_STATIC_MANIFEST,
            status=CheckStatus.FAIL,
            measured={"schema_errors": len(self.manifest_error.errors)},
            evidence=self.manifest_error.errors,
            remediation=self.manifest_error.remediation,
            duration_s=0.0,
        )

    def _subject(self, manifest: NormalizedManifest) -> Subject:
        return Subject(
            root=self.target,
            manifest=manifest,
            image_ref=self.image_ref,
            running=None if self._served is None else self._served.subject,
            outputs_dir=self.outputs_dir,
            runtime_evidence=self.evidence,
            network_evidence_json=self.network_evidence,
        )

    def check_behaviour(self, *, skip_build: bool, provider: ValidationProvider | None, record: bool) -> None:
        """Serve the package and make the checks of its behaviour.

        Args:
            skip_build: Whether to skip all of them instead.
            provider: What serves it.
            record: Whether to keep every message of an episode.
        """
        # `startup` is made by `_check_served`, because the others depend on it.
        ids = [rule.id for rule in self._rules(Level.RUNTIME, Level.SEMANTIC) if rule.id != _STARTUP]
        with contextlib.ExitStack() as stack:
            # The report lists the skipped checks, so that a short run cannot look complete.
            if skip_build:
                self._skip(ids, "--skip-build: the package is not run")
            elif provider is not None and self.manifest is None:
                self._skip(ids, "a provider needs a valid manifest to run the package as it declares")
            else:
                package = self._server(provider)
                if isinstance(package, ProvidedPackage):
                    # The image and the cleanup are known only after the container has stopped.
                    stack.callback(self._note_end, package)
                self._check_served(package, ids, stack, record=record)
            self._run_others(Level.RUNTIME, Level.SEMANTIC, provider=provider)
            # The graders of other packages must not use a server that has stopped.
            self._served = None

    def _note_end(self, package: ProvidedPackage) -> None:
        self.image_ref, self.cleanup = package.image_ref, package.cleanup

    def _run_others(self, *levels: Level, provider: ValidationProvider | None = None) -> None:
        """Run the graders of other packages."""
        if self.manifest is None or not self._others:
            return
        results = execute_graders(
            [grader for grader in self._others if grader.level in levels],
            self._subject(self.manifest),
            provider_capabilities=frozenset() if provider is None else provider.capabilities,
            prior=self.results,
        )
        for result in results:
            self.add(result)

    def _server(self, provider: ValidationProvider | None) -> PackageServer:
        if provider is None or self.manifest is None:
            return ServedPackage(self.target)
        return ProvidedPackage(provider, self.target, self.manifest)

    def _check_served(
        self, package: PackageServer, ids: Sequence[str], stack: contextlib.ExitStack, *, record: bool
    ) -> None:
        # The declared time limit is also the limit for one reply; very small ones would fail on a busy machine.
        episode_s = _REPLY_S if self.manifest is None else max(5.0, self.manifest.resources.episode_timeout_s)
        probe = Probe(
            url="",
            token=package.token if isinstance(package, ProvidedPackage) else self.token,
            reply_s=episode_s,
            manifest=self.manifest,
            folder=self.target,
            package=package,
            declares=self.declares,
        )

        def start() -> CheckEvidence:
            try:
                stack.enter_context(package)
            except NotServed as error:
                output = str(error).splitlines()
                raise CheckFailed(last_line(str(error)), *output[-12:-1], fix=package.advice) from error
            probe.url = package.url
            return checks_behaviour.startup(probe)

        startup = checks_behaviour.outcome_of(_STARTUP, start)
        self.add(startup)
        if startup.status is not CheckStatus.PASS:
            self._skip(ids)
            return
        self._served = package
        if isinstance(package, ProvidedPackage):
            self.image_ref = package.image_ref
        # Recording plays the episode once more, so it happens only if somebody reads it.
        if record or self._others:
            self._record(probe, episode_s)
        # With a public network there is nothing to measure.
        isolated = self.manifest is not None and self.manifest.network.mode != "public"
        for check_id in ids:
            if check_id == _NETWORK and isolated and isinstance(package, ProvidedPackage):
                self.add(self._network_result(package))
            else:
                self.add(checks_behaviour.run_check(check_id, probe))

    def _network_result(self, package: ProvidedPackage) -> CheckOutcome:
        assert self.manifest is not None
        try:
            self.network_evidence = package.network_evidence()
        except ProviderError as error:
            return skipped(_NETWORK, f"the network could not be measured: {message_of(error)}")
        return NetworkPolicyGrader().run(self._subject(self.manifest))

    def _record(self, probe: Probe, episode_s: float) -> None:
        """Keep every message of an episode, for graders of other packages and for the bundle."""
        try:
            self.plan = probe.plan
        except (CheckSkipped, CheckFailed):
            return  # the checks that need a plan say so
        self.evidence = collect_runtime_evidence(probe.url, self.plan, episode_timeout_s=episode_s, token=probe.token)

    def _skip(self, ids: Sequence[str], startup: str | None = None) -> None:
        """Skip the checks that need the package to run; `startup` is why it was not even started."""
        if startup is not None:
            self.add(skipped(_STARTUP, startup))
        for check_id in ids:
            self.add(skipped(check_id, f"{UNMET}{_STARTUP}"))


def _applies(rule: Rule, manifest: NormalizedManifest | None) -> bool:
    """Leave out checks of features that a package does not claim to have."""
    if manifest is None:
        return True
    if rule.id in ("runtime.rubric_introspectable", "runtime.reward_attribution"):
        return manifest.capabilities.rubric_tree
    return rule.id != "runtime.task_declaration_accuracy" or manifest.capabilities.task_api
