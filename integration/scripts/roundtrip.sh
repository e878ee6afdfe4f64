#!/bin/bash
# The cost of one command against the floor that two context switches set, in one boot.
set -eu
/opt/roundtrip
