#!/usr/bin/env bash
# Build a Kubernetes control plane for the tests of the operator (make k8s-test), into a cache:
#
#   tools/build_kubernetes.sh [FOLDER]      default: ${XDG_CACHE_HOME:-~/.cache}/meshwright/k8s
#
# Sources, Go and etcd are Debian's (bookworm: Kubernetes 1.20, Go 1.19, etcd 3.4). They are unpacked into the cache:
# nothing is installed, root is not needed, and apt's own lists stay as they are. Needs apt-get, dpkg-dev, make and
# 4 GB; some 14 minutes on two cores. FOLDER/bin then has etcd, etcdctl and the three kube-* programs (250 MB).
set -euo pipefail
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/meshwright/k8s}
programs=(kube-apiserver kube-controller-manager kube-scheduler)
[ -e "$folder/bin/.complete" ] && exit 0
for needed in apt-get dpkg-deb dpkg-source make; do
    command -v "$needed" > /dev/null || { echo "$0 needs $needed" >&2; exit 1; }
done

mkdir -p "$folder"/{apt/lists/partial,apt/archives/partial,bin,gocache,source,gopath/src/k8s.io}
cd "$folder"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
for kind in deb deb-src; do
    echo "$kind [signed-by=$keys] http://deb.debian.org/debian bookworm main"
done > apt/sources.list
apt=(apt-get -q -o "Dir::Etc::sourcelist=$PWD/apt/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::Cache=$PWD/apt"
    -o "Dir::State::lists=$PWD/apt/lists" -o "APT::Sandbox::User=$(id -un)")
"${apt[@]}" update
cd source
"${apt[@]}" download golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev etcd-server etcd-client
"${apt[@]}" --download-only source kubernetes
for package in *.deb; do dpkg-deb -x "$package" ../root; done
sources=$folder/gopath/src/k8s.io/kubernetes
rm -rf "$sources"
dpkg-source --no-copy -x kubernetes_*.dsc "$sources"
cp ../root/usr/bin/etcd ../root/usr/bin/etcdctl ../bin/

# The reflect2 of this release writes to memory that newer Go keeps read-only: the API server crashes at its start.
reflect2=$sources/vendor/github.com/modern-go/reflect2
rm -rf "$reflect2"
cp -r ../root/usr/share/gocode/src/github.com/modern-go/reflect2 "$reflect2"

export GOROOT=$folder/root/usr/lib/go-1.19 GOCACHE=$folder/gocache CGO_ENABLED=0
export PATH=$GOROOT/bin:$folder/tools:$PATH KUBE_GIT_VERSION_FILE=$folder/version.sh
mkdir -p "$folder/tools"
printf '#!/bin/sh\nshift\nexec cp -p "$@"\n' > "$folder/tools/rsync" # all that is asked of it: copy a program
chmod +x "$folder/tools/rsync"
printf 'KUBE_GIT_%s\n' COMMIT=debian TREE_STATE=archive VERSION=v1.20.2 MAJOR=1 MINOR=20 > "$KUBE_GIT_VERSION_FILE"
cd "$sources"
nice make generated_files
export GOPATH=$folder/gopath GO111MODULE=off
version=k8s.io/kubernetes/vendor/k8s.io/component-base/version
flags="-s -w -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20"
for program in "${programs[@]}"; do
    nice go build -p "${JOBS:-2}" -ldflags "$flags" -o "$folder/bin/$program" "k8s.io/kubernetes/cmd/$program"
done
cd "$folder"
rm -rf source gocache gopath root apt tools version.sh
touch bin/.complete
