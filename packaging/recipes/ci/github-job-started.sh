#!/bin/bash
# Hook of a self-hosted runner: ACTIONS_RUNNER_HOOK_JOB_STARTED=/usr/local/bin/github-job-started.sh in its file .env.
# Each job then has a fresh disk at $JOB_DISK.
set -eu
sudo freestone-job start "$RUNNER_NAME"
echo "JOB_DISK=/srv/jobs/$RUNNER_NAME" >>"$GITHUB_ENV"
