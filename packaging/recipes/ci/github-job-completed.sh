#!/bin/bash
# Hook of a self-hosted runner: ACTIONS_RUNNER_HOOK_JOB_COMPLETED=/usr/local/bin/github-job-completed.sh in its file .env.
set -eu
sudo freestone-job end "$RUNNER_NAME"
