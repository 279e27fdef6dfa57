"""schemathesis, by its command line: valid and invalid requests made from the published description."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.clients.checks import BASE_URL, OUT, expect, ran, run

NUM_EXAMPLES = 5  # of each operation; tests/api/test_schemathesis.py makes more
# As in tests/api/test_schemathesis.py: a description cannot state rules that only a model or a compiler can check.
_CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method"
)


def right_and_wrong_requests() -> None:
    report = OUT / "report.xml"
    ran(
        "schemathesis", "run", f"{BASE_URL}/openapi.json", "--url", BASE_URL, "--phases", "examples,fuzzing",
        "--mode", "all", "--checks", _CHECKS, "--max-examples", str(NUM_EXAMPLES), "--seed", "1",
        "--request-timeout", "20", "--report", "junit", "--report-junit-path", report, timeout_s=240,
    )  # fmt: skip
    cases = list(ElementTree.parse(report).iter("testcase"))
    wrong = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    expect(len(cases) >= 25 and not wrong, (len(cases), wrong))


if __name__ == "__main__":
    run(right_and_wrong_requests)
