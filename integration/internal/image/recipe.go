// Package image builds and caches the guests' disk images: a Debian release's root file system as an ext4 image, and
// that same system's kernel and boot modules. The three always come from one build, because a point release of
// Debian between two builds would leave a kernel without its modules.
package image

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// recipeVersion changes the cache key of every image; raise it when the build itself changes.
const recipeVersion = 1

// basePackages are in every image. The kernel's initramfs generator comes along as a dependency and never runs.
var basePackages = []string{
	"ibverbs-providers",
	"ibverbs-utils",
	"infiniband-diags",
	"iproute2",
	"kmod",
	"linux-image-amd64",
	"perftest",
	"procps",
	"python3-pyverbs", // with rdma-core's own test suite
	"rdma-core",
	"rdmacm-utils",
	"strace",
	"util-linux",
}

// excludedPaths are left out when dpkg unpacks: documentation, and drivers that no guest has a device for, which would
// cost unpacking and depmod time. infiniband, net (virtio, e1000e, dummy), vfio and iommu drivers stay.
var excludedPaths = append([]string{
	"/usr/share/doc/*",
	"/usr/share/info/*",
	"/usr/share/locale/*",
	"/usr/share/man/*",
	"/etc/kernel/postinst.d/initramfs-tools", // its initramfs would take half of the build and is not used
}, withModuleRoots(
	"drivers/bluetooth", "drivers/gpu", "drivers/hid", "drivers/hwmon", "drivers/iio", "drivers/input", "drivers/isdn",
	"drivers/leds", "drivers/media", "drivers/mtd", "drivers/net/can", "drivers/net/usb", "drivers/net/wireless",
	"drivers/nfc", "drivers/power", "drivers/scsi", "drivers/staging", "drivers/thunderbolt", "drivers/usb",
	"drivers/video", "drivers/watchdog", "net/bluetooth", "net/mac80211", "net/wireless", "sound",
)...)

// includedPaths are unpacked although an excluded path covers them: rdma-core's test suite is packaged as
// documentation. dpkg creates no folder above an included one by itself.
var includedPaths = []string{"/usr/share/doc/rdma-core", "/usr/share/doc/rdma-core/tests/*"}

// withModuleRoots spells kernel module folders both ways: before Debian 13 they were packaged under /lib.
func withModuleRoots(folders ...string) []string {
	var out []string
	for _, f := range folders {
		out = append(out, "/lib/modules/*/kernel/"+f+"/*", "/usr/lib/modules/*/kernel/"+f+"/*")
	}
	return out
}

// bootModules must be loaded before the root file system can be mounted and the agent reached. A name that is
// neither a module nor built in is an error, unless it is optional.
var bootModules = []bootModule{
	{Name: "virtio_pci"},
	{Name: "virtio_blk"},
	{Name: "virtio_console"},
	{Name: "crc32c_generic", Optional: true}, // ext4 asks for it by a soft dependency
	{Name: "ext4"},
}

type bootModule struct {
	Name     string
	Optional bool
}

// customizeHooks run on the host after the packages are in place; "$1" is the root folder.
var customizeHooks = []string{
	`chroot "$1" useradd --create-home --uid 1000 --shell /bin/bash tester`,
	`printf '127.0.0.1 localhost guest\n::1 localhost\n' > "$1/etc/hosts"`,
	`printf 'guest\n' > "$1/etc/hostname"`,
}

// spareMiB is the free space in the root file system, in MiB; the image is sparse, so unused space costs nothing.
const spareMiB = 1024

// Recipe is everything that decides what is in an image.
type Recipe struct {
	Version  int
	Suite    string
	Packages []string // sorted, without duplicates
	Excludes []string
	Includes []string // exceptions to Excludes
	Hooks    []string
	Modules  []bootModule
	SpareMiB int
}

// packageName is Debian's policy 5.6.1.
var packageName = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]+$`)

// NewRecipe is the recipe of a release's base image plus the given Debian packages.
func NewRecipe(suite string, extra []string) (*Recipe, error) {
	if suite != "bookworm" && suite != "trixie" {
		return nil, fmt.Errorf("no guest of Debian release %q: use bookworm or trixie", suite)
	}
	for _, p := range extra {
		if !packageName.MatchString(p) {
			return nil, fmt.Errorf("%q is not the name of a Debian package", p)
		}
	}
	packages := slices.Concat(basePackages, extra)
	slices.Sort(packages)
	return &Recipe{
		Version:  recipeVersion,
		Suite:    suite,
		Packages: slices.Compact(packages),
		Excludes: excludedPaths,
		Includes: includedPaths,
		Hooks:    customizeHooks,
		Modules:  bootModules,
		SpareMiB: spareMiB,
	}, nil
}

// Key names the suite and the package list. Images of one key replace each other.
func (r *Recipe) Key() string {
	return r.Suite + "-" + digest(strings.Join(r.Packages, " "))[:8]
}

// Name is the image's folder name: its key and a hash of the whole recipe.
func (r *Recipe) Name() string {
	b, err := json.Marshal(r)
	if err != nil {
		panic("image: a recipe of plain strings did not marshal: " + err.Error())
	}
	return r.Key() + "-" + digest(string(b))[:12]
}

func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

// mmdebstrapArgs is the command line that fills the folder root. There is no mirror on it: mmdebstrap's default is
// the suite's own archive with its updates and security fixes.
func (r *Recipe) mmdebstrapArgs(root string) []string {
	args := []string{"--mode=root", "--variant=minbase", "--format=directory", "--include=" + strings.Join(r.Packages, ",")}
	for _, p := range r.Excludes {
		args = append(args, "--dpkgopt=path-exclude="+p)
	}
	// dpkg lets the last pattern that matches decide.
	for _, p := range r.Includes {
		args = append(args, "--dpkgopt=path-include="+p)
	}
	for _, h := range r.Hooks {
		args = append(args, "--customize-hook="+h)
	}
	return append(args, r.Suite, root)
}
