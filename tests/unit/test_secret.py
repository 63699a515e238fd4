"""What counts as secret, by name and by value, and what only looks like it."""

import pytest

from phalanx.secret import is_secret, looks_secret, within

NAMED = (
    "PGPASSWORD MYSQL_PWD PASSPHRASE GPG_PASSPHRASE GITHUB_PAT SSH_KEY OPENAI_KEY OPENAI_API_KEY OPENAI_APIKEY "
    "HF_TOKEN HUGGING_FACE_HUB_TOKEN AUTH_TOKEN_V2 CLIENT_SECRET SECRET_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY "
    "DB_PASS SSHPASS REDISCLI_AUTH DB_CREDENTIALS wandb_api_key SENTRY_DSN ENCRYPTION_KEY API_KEYS PRIVATE_KEY_PEM "
    "SMTP_PASSWD TOKEN SECRET DB_PW ROOT_PW LDAP_BINDPW DBPASS API_JWT DB_PASSWORD1 HF_TOKEN2 "
    "AUTH_TOKEN_ID"
)
PLAIN = (
    "MONKEY KEYBOARD KEY_COUNT TOKENIZER_PATH TOKENIZERS_PARALLELISM SSH_KEY_PATH SSH_AUTH_SOCK SECRETARY PWD OLDPWD "
    "TOKEN_COUNT TOKENS_PER_BATCH MAX_TOKENS PAD_TOKEN EOS_TOKEN SORT_KEY PUBLIC_KEY SECRET_NAME PATH MANPATH PATTERN "
    "FILE_PAT COMPASS BYPASS TWO_PASS KEY PASS PASSES AUTHOR TOKEN_DROPOUT API_KEY_FILE USE_AUTH TURNKEY "
    "PAD_TOKEN_ID EOS_TOKEN_IDS"
)
SECRET_VALUES = (
    "postgres://u:pass@db/x",
    "http://me:p%40ss@proxy:3128",
    "redis://:pass@cache",
    "postgres://u:pa/ss@db",
    "ghp_" + "a1B2" * 9,
    "github_pat_" + "1A_" * 10,
    "hf_" + "AbCd" * 8,
    "sk-" + "a1b2" * 8,
    "sk-proj-" + "a1b2" * 8,
    "AKIA" + "ABCD" * 4,
    "xoxb-123456789012-abc",
    "Bearer eyJhbGciOi.eyJzdWIiOi.c2ln",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nabc",
    "https://" + "a1" * 20 + "@github.com/me/x.git",
    "jdbc:mysql://h/db?user=u&password=hush",
    "host=h user=u password=hush",
    "DefaultEndpointsProtocol=https;AccountName=n;AccountKey=aGFzaA==;",
)
PLAIN_VALUES = (
    "http://proxy:3128",
    "http://host:8080/a@b",
    "docker://registry:5000/img@sha256:ab",
    "ssh://git@github.com/me/x",
    "git@github.com:me/x",
    "hf_transformers",
    "sk-learn",
    "sk-learn-extra",
    "ask-me",
    "https://user@host/x",
    "user:pass",
    "http://u:$PROXY_PASS@proxy:3128",
    "http://u:${PROXY_PASS}@proxy:3128",
    "password=$PW",
    "ask.password=false",
    "",
)


@pytest.mark.parametrize("name", NAMED.split())
def test_these_names_are_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", PLAIN.split())
def test_these_names_only_contain_the_letters(name):
    assert not is_secret(name)


@pytest.mark.parametrize("value", SECRET_VALUES)
def test_these_values_are_secrets_whatever_their_name(value):
    assert looks_secret(value)
    assert is_secret("DATABASE_URL", value)


@pytest.mark.parametrize("value", PLAIN_VALUES)
def test_these_values_are_none(value):
    assert not looks_secret(value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("export HF_TOKEN=abc", "HF_TOKEN"),
        ('export HF_TOKEN="abc"', "HF_TOKEN"),
        ("ALL,MYSQL_PWD=x", "MYSQL_PWD"),
        ("--env=GITHUB_PAT=x", "GITHUB_PAT"),
        ("curl http://me:pw@h", "URL"),
        ("export HF_TOKEN=$(cat ~/.token)", None),
        ('export HF_TOKEN="$TOKEN"', None),
        ("HF_TOKEN= python t.py", None),
        ("export HF_TOKEN=`cat ~/.token`", None),
        ("t.py --api-key `cat ~/.token`", None),
        ("PWD=/data/me python t.py", None),
        ("pwd=`pwd`; pwd=~/project; pwd=../x", None),
        ("export password=`pass show hf`", None),
        ("Server=h;Pwd=hunter2", "token"),
        ("export TOKENIZER_PATH=x", None),
        ("test $HF_TOKEN = x", None),
        ("train.py sort_key=x pad_token=y", None),
        ("export hf_token=abc", "hf_token"),
        ("t.py --api-key abcdef1", "--api-key"),
        ("t.py --db_password=hunter2", "--db_password"),
        ("t.py --hub-token 'abcdef1'", "--hub-token"),
        ('t.py --hub_token $HF_TOKEN --api-key "$KEY"', None),
        ("t.py --use_auth_token true --pad_token abcdef1 --token-dim 1000000", None),
        ("t.py --api-key-file /home/me/key --no-password output.txt --api-key --verbose", None),
    ],
)
def test_secrets_within_lines_of_shell(text, found):
    assert (within(text) is None) if found is None else (found in within(text))
