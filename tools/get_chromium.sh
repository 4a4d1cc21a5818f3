#!/bin/sh
# Makes sure that there are a Chromium and its driver, which the tests of pages and traces look with.
# Debian's packages are installed where that is possible; elsewhere those tests are skipped.
set -u

# A mirror that does not answer is given up on.
QUICK="-o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o Acquire::Retries=1"

present() {
    command -v chromedriver >/dev/null || return 1
    for name in chromium chromium-browser google-chrome chrome; do
        command -v "$name" >/dev/null && return 0
    done
    return 1
}

install() {
    command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || return 1
    export DEBIAN_FRONTEND=noninteractive
    for attempt in 1 2 3; do
        apt-get $QUICK update -qq &&
            apt-get $QUICK install -y -qq --no-install-recommends \
                chromium chromium-driver fonts-dejavu-core >/dev/null &&
            return 0
        echo "get_chromium.sh: attempt $attempt to install chromium failed" >&2
        sleep 5
    done
    return 1
}

present || install
if ! present; then
    echo "WARNING: no chromium and chromedriver here, and they cannot be installed (that takes" >&2
    echo "         apt-get and root): the tests that look at pages in a browser ARE SKIPPED." >&2
fi
exit 0
