from openenv.validation import CheckResult, CheckStatus, Level, NormalizedManifest, ProviderCapability, Subject


class SbomGrader:
    """The package lists the contents of its image."""

    check_id = "static.sbom"  # the policy must contain it
    level = Level.STATIC
    requires_capabilities: frozenset[str] = frozenset()  # fields of validation.capabilities
    requires_provider: frozenset[ProviderCapability] = frozenset()
    depends_on: tuple[str, ...] = ()

    def applies_to(self, manifest: NormalizedManifest) -> bool:
        return True

    def run(self, subject: Subject) -> CheckResult:
        is_there = (subject.root / "sbom.json").is_file()
        return CheckResult(
            check_id=self.check_id,
            status=CheckStatus.PASS if is_there else CheckStatus.FAIL,
            evidence=["sbom.json is there" if is_there else "sbom.json is missing"],
            duration_s=0.0,
        )
