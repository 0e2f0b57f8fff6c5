#!/usr/bin/env bash
# Builds the control plane of Kubernetes 1.20.2 from the source package of Debian 12: kube-apiserver, kube-scheduler
# and kube-controller-manager, with Debian's etcd beside them. Once: 6 minutes of a CPU, 150 MB of downloads,
# 3 GB of disk on the way and 180 MB in the end.
#
# They land in KEEPSTEP_KUBERNETES (~/.cache/keepstep/kubernetes-1.20.2). Nothing is installed and no setting of apt's
# is changed, so it needs no root: apt works on lists of its own below that folder, and checks Debian's signature there.
set -euo pipefail
place=${KEEPSTEP_KUBERNETES:-${XDG_CACHE_HOME:-$HOME/.cache}/keepstep/kubernetes-1.20.2}
programs="kube-apiserver kube-scheduler kube-controller-manager"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
if [ -e "$place/etcd" ]; then exit; fi # the last to come

for tool in apt-get dpkg-deb dpkg-source patch flock; do
  command -v $tool > /dev/null || missing="${missing:-} $tool"
done
[ -e $keyring ] || missing="${missing:-} $keyring"
if [ -n "${missing:-}" ]; then
  echo "Kubernetes cannot be built here, as there is no$missing (packages of Debian's: apt, dpkg-dev, patch," \
    "util-linux, debian-archive-keyring)" >&2
  exit 2
fi

work=$place.building
mkdir -p "$place" "$work"
exec 9> "$place.lock"
flock 9
if [ -e "$place/etcd" ]; then exit; fi
trap 'rm -rf "$work"' EXIT
echo "building Kubernetes in $place, once: downloads 150 MB, takes 6 minutes of a CPU" >&2

mkdir -p "$work"/apt/{lists,cache/archives}/partial "$work/go/src/k8s.io" "$work/unpacked"
cd "$work"
echo "deb [signed-by=$keyring] $mirror bookworm main
deb-src [signed-by=$keyring] $mirror bookworm main" > apt/sources.list
: > apt/status
cat > apt/conf << END
APT::Sandbox::User "";
Dir::Etc::SourceList "$work/apt/sources.list";
Dir::Etc::SourceParts "-";
Dir::State::Lists "$work/apt/lists";
Dir::State::Status "$work/apt/status";
Dir::Cache "$work/apt/cache";
END
export APT_CONFIG=$work/apt/conf
apt-get -qq update
apt-get -qq download golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev etcd-server
apt-get -qq source --download-only kubernetes
for package in *.deb; do dpkg-deb -x "$package" unpacked; done
tree=$work/go/src/k8s.io/kubernetes
dpkg-source --no-check -x kubernetes_*.dsc "$tree" > unpack.log # apt has checked it

export GOROOT=$work/unpacked/usr/lib/go-1.19 GOPATH=$work/go GOCACHE=$work/cache
export GO111MODULE=off CGO_ENABLED=0
go=$GOROOT/bin/go
cd "$tree"
# Kubernetes' own reflect2, 1.0.1, crashes when Go is newer than 1.17.
rm -r vendor/github.com/modern-go/reflect2
cp -r "$work/unpacked/usr/share/gocode/src/github.com/modern-go/reflect2" vendor/github.com/modern-go/
# Its check of custom resources compares two reflect.Value by their addresses; from Go 1.18 on an empty string has the
# same address as the zero value, and is taken for null.
type=vendor/k8s.io/kube-openapi/pkg/validation/validate/type.go
sed -i 's/if data == nil || reflect.DeepEqual(reflect.Zero(.*/if data == nil {/' $type
if grep reflect.Zero $type; then exit 1; fi

# The one generated file that the package leaves out.
folders=$(grep -rl '+k8s:openapi-gen=' --include='*.go' vendor/k8s.io/ staging/src/k8s.io/ pkg/ cmd/ plugin/ |
  grep -v -e code-generator -e sample-apiserver -e kube-openapi -e gengo | sed 's|^staging/src/|vendor/|' |
  xargs -n1 dirname | LC_ALL=C sort -u | sed 's|^|k8s.io/kubernetes/|' | paste -sd,)
"$go" run ./vendor/k8s.io/kube-openapi/cmd/openapi-gen --logtostderr -i "$folders" \
  -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/violations"

version=k8s.io/kubernetes/vendor/k8s.io/component-base/version
for program in $programs; do
  "$go" build -tags providerless,dockerless -o "$work/$program" -ldflags \
    "-s -w -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20" "./cmd/$program"
done
cd "$work"
mv $programs "$place"
mv unpacked/usr/bin/etcd "$place"
