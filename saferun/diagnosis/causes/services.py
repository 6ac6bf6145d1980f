"""What goes wrong with services outside the job: the Hugging Face Hub, object stores, anything by HTTP. Pure.

Sources: exceptions of requests, urllib3, urllib, httpx, aiohttp, huggingface_hub, botocore, google-api-core,
azure-core and grpc; RFC 9110 (status codes).
"""

from __future__ import annotations

import re

from saferun.diagnosis.causes.failure import Failure, cause, own_lines, shortened
from saferun.diagnosis.causes.reasons import ENDS, has_level
from saferun.diagnosis.causes.texts import final_lines, first_line
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.diagnosis_values import Cause

# Whose exceptions are about a service, by the full name; less those about the call itself.
_TYPES = LazyPattern(
    r"(?:ssl|requests\.exceptions|urllib3\.exceptions|urllib\.error|http\.client|httpx|httpcore|aiohttp\.client_exceptions"
    r"|huggingface_hub\.(?:utils\._\w{1,20}|errors)|botocore\.(?:exceptions|errorfactory)|boto3\.exceptions"
    r"|s3transfer\.\w{1,20}"
    r"|fsspec\.exceptions|google\.(?:api_core|cloud|auth|resumable_media)\.\w{0,40}\.?exceptions|google\.(?:api_core"
    r"|cloud|auth)\.exceptions"
    r"|azure\.core\.exceptions|gcsfs\.\w{1,20}|grpc(?:\.\w{1,20}){0,2}|wandb\.errors(?:\.\w{1,20})?)\."
    r"(?!HFValidationError|ParamValidation|Invalid|Missing|ProfileNotFound|UnknownService|DataNotFound"
    r"|UsageError)\w{1,60}$"
)
# Of clients of databases, queues and trackers, which also raise what the caller did wrong.
_CLIENT_TYPES = LazyPattern(
    r"(?:psycopg\d?|asyncpg|pymysql|MySQLdb|mysql|pymongo|redis|sqlalchemy|elasticsearch|opensearchpy|kafka|pika|etcd3"
    r"|websockets?|mlflow|comet_ml|neptune|clearml|openai|tritonclient|swanlab|minio|ossaudiodev|oss2|qcloud_cos|hdfs"
    r"|smart_open|paramiko|zmq|nats|celery|kombu|cassandra|influxdb\w{0,10}|snowflake"
    r"|clickhouse_\w{1,12})\.(?:\w{1,40}\.){0,4}"
    r"\w{0,40}(?:Connection|Operational|Timeout|Unavailable|Disconnect|Transport|Network|ServerSelection|AutoReconnect"
    r"|RateLimit|Throttl|TooMany|AccessDenied|Authenti|Unauthorized|Forbidden|ServiceError|ServerError|S3Error"
    r"|HTTP)\w{0,40}$"
)
_LOCAL = "sqlite3."
# RFC 9110, 15.5 and 15.6, and what object stores answer beside them.
_REASONS = (
    r"(?:Bad Request|Unauthorized|Payment Required|Forbidden|Not Found|Method Not Allowed"
    r"|Request Time-?out|Conflict|Gone"
    r"|Too Many Requests|Internal Server Error|Bad Gateway|Service (?:Temporarily )?Unavailable|Gateway Time-?out"
    r"|Slow ?Down|Backend Error|Rate ?Limit\w{0,12})"
)
# What Python code raises of a wrong value or a missing key: a single word in it means nothing, without an address.
_OF_A_VALUE = r"(?:Key|Value|Type|Assertion)Error\b(?!.{0,400}https?://)"
_MESSAGE = LazyPattern(
    r"\b([45]\d\d) (?:Client|Server) Error: |\bHTTP [Ee]rror ([45]\d\d)\b|HTTP status (?:client"
    r"|server) error \(([45]\d\d)\b"
    r"|An error occurred \((\w{1,60})\) when calling the (?:\w{1,60}) operation|HTTPS?ConnectionPool\(host="
    r"|[Yy]ou are trying to access a gated repo|[Cc]annot access gated repo|We couldn't connect to 'https?://"
    r"|\b(?:[Ff]ailed|[Uu]nable) to (?:download|upload|fetch) (?:s3|gs|gcs|hf|oci|abfss?|https?)://"
    r"|\b(?:API|HTTP|REST|[Rr]equest)\b.{0,200}?\b(?:failed|rejected|returned|got|response)\b.{0,40}?"
    rf"\b(?:code|status)(?: code)?[ :=]{{1,3}}([45]\d\d)\b"
    rf"|^(?!{_OF_A_VALUE}).{{0,500}}?\b[Ss]tatus[ _][Cc]ode[ :=]{{1,3}}([45]\d\d)\b"
    r"|\bAWS Error [A-Z][A-Z_]{1,40} (?:\(HTTP status \d{3}\) )?during \w{1,40} operation\b"
    r"|\bTunnel connection failed: ([45]\d\d)\b|\bCAS service error\b|\bReqwest(?:Middleware)? [Ee]rror\b"
    r"|\btoo many (?:clients|connections)\b|\b[Mm]ax(?:imum)? (?:number of )?clients?(?: connections)? reached"
    r"|\bQueuePool limit of size\b|\bStatusCode\.(?:UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|UNAUTHENTICATED)\b"
    r"|\bdoesn't exist on the Hub or cannot be accessed\b|\bspecific connection error when trying to load\b"
    r"|'pipe:(?:curl|wget|aws|gsutil|gcloud|s5cmd|rclone)\b.{0,300}\bexit [1-9]"
    r"|[Cc]ouldn't reach .{1,200} on the Hub|\bunable to access 'https?://"
    r"|\b(?:[Cc]annot|[Cc]ould not|[Ff]ailed to|[Uu]nable to) (?:reach|connect to|access|contact) (?:\w{1,20} ){0,2}"
    r"(?:bucket|endpoint|service|the Hub"
    # Not one of the job's own.
    r"|(?<![Rr]endezvous )(?<!parameter )(?<![Ss]tore )(?<!master )(?<!rank )server"
    r"(?! (?:at |on )?(?:rank|master|localhost|\d|[\w.-]{1,80}:\d)))\b(?! at (?:rank|\d))"
    r"|\bcertificate verif\w{1,8} failed\b"
    r"|^PermissionError: (?!\[Errno)(?:.{0,80}(?:Forbidden"
    r"|Access ?Denied|[Cc]redential))"
    rf"|^(?:(?!{_OF_A_VALUE})\w{{1,40}}(?:Error|Exception): (?:b?['\"])?|\w{{1,40}}(?:Error|Exception): (?:b?['\"])?"
    rf"(?=[45]\d\d ))(?:([45]\d\d) )?{_REASONS}['\"]?(?: \(|$)"
)
# A script that reports its own end, as a logger does, or the AWS CLI; other lines are of requests that are repeated.
_LAST = LazyPattern(
    r"(?:\bUncaught\b|\bCRITICAL\b|\bFATAL\b|\bunhandled exception\b).{0,160}?\b([45]\d\d) (?:Client|Server) Error: "
    r"|^(?:fatal error|(?:download|upload|copy|move|delete) failed): .{0,400}?"
    r"\bAn error occurred \((\w{1,60})\) when calling the \w{1,60} operation"
    r"|^wandb: ERROR .{0,200}(?:\bapi_key not configured\b|<Response \[([45]\d\d)\]>)"
    # curl, wget, git, and the clients of object stores, as they end.
    r"|^curl: \((?:5|7|18|22|28|35|47|52|55|56|60|92)\) .{1,300}|^(?:[\d: -]{19} )?ERROR ([45]\d\d): [A-Z]"
    r"|^fatal: (?:unable to access 'https?://|Authentication failed for 'https?://|Could not read from remote repo)"
    r"|^(?:CommandException|ServiceException|AccessDeniedException|BadRequestException): .{0,40}?\b([45]\d\d)\b"
    r"|^ERROR: \(gcloud\.[\w.-]{1,60}\) .{1,200}|^ERROR \"(?:cp|sync|mv|ls) .{0,40}?\b(?:s3|gs)://"
)
_HOST = LazyPattern(r"\bhost='([\w.-]{1,120})'|\bhttps?://([\w.-]{1,120})")
_CODE = LazyPattern(r"\b([45]\d\d)\b")
# Numbers that are no status: a port, and what stands in a path.
_ADDRESS = LazyPattern(
    r"\bport[ =]\d{1,5}\b|\bhttps?://\S{1,300}|\burl: \S{1,300}|(?:\.[a-z]{2,10}|\d|\]|\blocalhost):\d{1,5}\b"
)
_UNREACHED = LazyPattern(
    r"ConnectionPool\(host=|Max retries exceeded|Connect(?:ion)?Error\b|(?:Connect|Read)Timeout|[Tt]imed? ?out\b"
    r"|[Cc]onnection (?:error|refused|reset|aborted|broken)|[Cc]ouldn't (?:reach|connect)"
    r"|(?:[Cc]annot|[Cc]ould not|[Ff]ailed to|[Uu]nable to) (?:reach|connect|contact)\b"
)
_TLS = LazyPattern(r"\bcertificate|CERTIFICATE_VERIFY|CertificateError|SSL(?:Error|CertVerification|EOFError)|\bTLS\b")
_RATE = frozenset(
    {"429", "503", "SlowDown", "RequestLimitExceeded", "TooManyRequests", "Throttling", "ThrottlingException"}
)
_ACCESS = frozenset({"401", "403", "AccessDenied", "InvalidAccessKeyId", "ExpiredToken", "SignatureDoesNotMatch"})
_ACCESS_ADVICE = "look at the token or key that the ranks have on every host (HF_TOKEN, AWS_*), and what it may read"
_ABSENT = frozenset({"404", "410", "NoSuchKey", "NoSuchBucket"})
# Words about what a client shows a service; tokens of language models are none.
_CREDENTIALS = LazyPattern(
    r"[Cc]redential|\b(?:API|[Aa]ccess|[Aa]uth\w{0,12}|[Bb]earer|[Rr]efresh|SSO|HF|user)[ _]?(?:[Tt]oken|[Kk]ey)\b"
    r"|\bapi_key\b|\b[Nn]o token found\b|\binvalid_grant\b"
)
# The variables of Hugging Face's libraries; that one could run them offline they say of each connection that fails.
_OFFLINE = LazyPattern(
    r"\bOfflineModeIsEnabled\b|\b[Oo]ffline mode is (?:enabled|on|set)\b|\boutgoing traffic has been disabled\b"
)
_OFFLINE_ADVICE = (
    "the job is set to offline (HF_HUB_OFFLINE, local_files_only) and the file is not in the cache: download it before "
    "the job into a cache that all hosts have (HF_HOME), or unset it"
)
# What wandb prints while the script ends; a line of its own may be empty.
_WANDB = "wandb:"
_WANDB_ENDS = LazyPattern(
    r"wandb: .{0,40}?\b(?:Waiting for W&B process to finish|Run (?:history|summary)|View run|Synced|Find logs at)\b"
)
_WORD = LazyPattern(r"[^\W\d_]{1,40}")
_LINES_OF_THE_END = 10


def service_error(failure: Failure) -> Cause | None:
    """A service outside the job refused a request, or did not answer."""
    error = failure.error
    found = first_line(_MESSAGE, failure.messages)
    if found is None and error is not None and _is_service(error.last.exception, (error.last.message or ("",))[0]):
        return _cause(failure, error.last.message[0], "")
    found = found or _printed_last(failure)
    return _cause(failure, found[0], next(filter(None, found[1].groups()), "")) if found is not None else None


def _printed_last(failure: Failure) -> tuple[str, re.Match[str]] | None:
    """What a client reports at the end of the output; not what wandb does after the script itself has ended."""
    found = first_line(_LAST, final_lines(failure))
    if found is None or not found[0].startswith(_WANDB):
        return found
    last = failure.lines[-_LINES_OF_THE_END:]
    above = last[: last.index(found[0])] if found[0] in last else last
    own = own_lines([line for line in above if not line.startswith(_WANDB)])
    has_ended = any(map(_WANDB_ENDS.match, above)) or (bool(own) and _reports_its_end(own[-1]))
    return None if has_ended else found


def _reports_its_end(line: str) -> bool:
    return has_level(line) or not ENDS.isdisjoint(word.lower() for word in _WORD.findall(line))


def _is_service(exception: str, line: str) -> bool:
    if _TYPES.match(exception) is not None:
        return True
    # A database in a file is none.
    return _CLIENT_TYPES.match(exception) is not None and _LOCAL not in line


def _cause(failure: Failure, line: str, code: str) -> Cause:
    code = code or (plain[1] if (plain := _CODE.search(_ADDRESS.sub("", line)[:200])) is not None else "")
    host = _HOST.search(line)
    who = f"{host[1] or host[2]} " if host is not None else "a service outside the job "
    is_silent = _UNREACHED.search(line) is not None and _TLS.search(line) is None
    what = "was not reached or did not answer" if is_silent else "refused or failed a request"
    what = f"answered {code}" if code else what
    advice = _advice(code, line)
    if not code and first_line(_OFFLINE, (line, *failure.messages)) is not None:
        what, advice = "was not contacted", _OFFLINE_ADVICE
    return cause(failure, "remote_service_error", f"{who}{what}: {shortened(line, 160)}", advice, proof=line)


def _advice(code: str, line: str) -> str:
    if _TLS.search(line):
        return (
            "the connection is not trusted: check whether a proxy stands between, and whether the ranks have its "
            "certificate (REQUESTS_CA_BUNDLE, SSL_CERT_FILE), and this host the right time"
        )
    if code in _RATE:
        return "too many requests: download once before the job, or on one rank, and read from a shared directory"
    if code in _ACCESS:
        return _ACCESS_ADVICE
    if code in _ABSENT:
        return "look at the name: the service does not know it, or does not show it to this token"
    if _CREDENTIALS.search(_ADDRESS.sub("", line)) and not _UNREACHED.search(line):
        return _ACCESS_ADVICE
    return "check whether this host reaches the service (proxy, firewall); download once before the job"
