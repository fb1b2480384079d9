"""Errors about the location of a table, in one line."""

from __future__ import annotations

import pytest

from millstream.pipelines.jobs.error_reason import place_error, reason_of

_STEP = "\n   \x1b[31m↳\x1b[0m "
_GET = "Error performing GET http://127.0.0.1:5000/nobucket?list-type=2&prefix=lake in 20.08ms - Server returned"
_NO_BUCKET = (
    f"Kernel error -> Generic S3 error{_STEP}Error performing list request{_STEP}{_GET} non-2xx status code{_STEP}"
    f'404 Not Found{_STEP}<?xml version="1.0"?>\n<Error><Code>NoSuchBucket</Code><Message>The specified bucket does '
    "not exist</Message><BucketName>nobucket</BucketName></Error>\n"
)
_REFUSED = (
    f"Generic S3 error{_STEP}Error performing GET http://127.0.0.1:1/lake/orders/_delta_log in 1ms - HTTP error{_STEP}"
    f"error sending request{_STEP}tcp connect error{_STEP}Connection refused (os error 111)\n"
)
_NO_CREDENTIALS = (
    f"Generic S3 error{_STEP}Error performing PUT http://169.254.169.254/latest/api/token in 5ms{_STEP}403 Forbidden"
)
_IN_A_TASK = (
    "Job aborted.\nTraceback (most recent call last):\n  File x\n"
    "FileNotFoundError: [Errno 2] No such file or directory: '/proc/nolake'\n\n\tat java"
)


@pytest.mark.parametrize(
    ("output", "reported"),
    [
        (
            _NO_BUCKET,
            "the object store, bucket 'nobucket' at http://127.0.0.1:5000: NoSuchBucket (The specified bucket does not "
            "exist)",
        ),
        (_REFUSED, "the object store, bucket 'lake' at http://127.0.0.1:1: Connection refused (os error 111)"),
        (
            _NO_CREDENTIALS,
            "there are no credentials for the object store: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY where the "
            "node, or the manual run, is started",
        ),
        (
            _IN_A_TASK,
            "folder '/proc/nolake' cannot be written or read: No such file or directory; set another one with `lake` "
            "or `pipelines-lake`",
        ),
    ],
)
def test_the_error_is_one_line(output: str, reported: str) -> None:
    assert place_error(output) == reported
    assert reason_of(RuntimeError(output)) == reported
    assert reason_of(RuntimeError(f"Traceback (most recent call last):\n  File x\nOSError: {output}")) == reported


def test_other_errors_are_unchanged() -> None:
    assert place_error("a column is unknown") is None
    assert place_error("Generic S3 error: of an unknown kind") is None
    assert reason_of(PermissionError(13, "Permission denied", "/lake")).startswith("folder '/lake' cannot be")
