#!/usr/bin/env bash
# Builds the documentation site in site/, and checks the generated pages, all links, and names that its search must
# find. .venv, if it exists, compares the generated pages with the code. .venv-docs builds the site, without JAX. The
# first call takes 70 s, 190 MB of disk space for both, and .4 GB of memory. Later calls take at most 30 s.
#
#   bash launch/site.sh        (PYTHON=... selects another interpreter for .venv-docs)
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environments.sh
export NO_MKDOCS_2_WARNING=1
[ ! -x .venv/bin/python ] || PYTHONPATH=. .venv/bin/python docs/generate.py --check
if ! is_complete .venv-docs; then
  find_python
  make_env .venv-docs "$python"
  requirements=$("$python" -c "
import tomllib
print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')")
  mapfile -t requirements <<<"$requirements"
  install .venv-docs "${requirements[@]}"
  rm .venv-docs/unfinished
fi
.venv-docs/bin/mkdocs build --strict # without --quiet, which would hide warnings from --strict
.venv-docs/bin/python docs/check_search.py
echo "site: site/index.html. To search it, serve it: python3 -m http.server --directory site"
