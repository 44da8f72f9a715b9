// Package settings reads the settings of a command from flags, the environment and a file, and
// checks their values. It also parses and formats sizes.
package settings

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
)

// Values of --device. In all but the first, each GPU is opened in a mover when an engine first
// registers memory on it.
const (
	DeviceHost      = "host"       // shared memory and engines on CPUs only
	DeviceAuto      = "auto"       // host in this process
	DeviceHostMover = "host-mover" // host in a mover too
	DeviceCUDA      = "cuda"       // as auto, but a start without CUDA is an error
)

// Devices are all values of --device.
var Devices = []string{DeviceAuto, DeviceHost, DeviceHostMover, DeviceCUDA}

// Values of --integrity.
const (
	IntegrityFull   = "full"
	IntegrityHeader = "header"
)

// The values of settings. Each parses the same text from a flag, the environment or the file, and
// its error names what is allowed.

// Discreet is a setting's value whose text holds secrets; Shown returns the text without them.
type Discreet interface{ Shown(text string) string }

// value is a setting's value: its type, its text, and the reader of a text.
type value struct {
	kind string
	text func() string
	set  func(text string) error
}

func (v *value) Type() string          { return v.kind }
func (v *value) String() string        { return v.text() }
func (v *value) Set(text string) error { return v.set(text) }

// ranged returns a value from low to high; hint is what its error says beside these.
func ranged[T int | int64 | time.Duration](
	v *T, low, high T, kind, hint string, parse func(string) (T, error), format func(T) string,
) pflag.Value {
	return &value{kind, func() string { return format(*v) }, func(text string) error {
		n, err := parse(text)
		if err != nil || n < low || n > high {
			return fmt.Errorf("allowed: %s to %s%s", format(low), format(high), hint)
		}
		*v = n
		return nil
	}}
}

// Size returns the value of a setting in bytes, from low to high, with a unit: 4GiB, 512MiB,
// 1048576.
func Size(v *int64, low, high int64) pflag.Value {
	return ranged(v, low, high, "size", ", such as 4GiB, 512MiB or a number of bytes", ParseSize, FormatSize)
}

// Rate returns the value of a setting that is one of some words, each with its number, or bytes per
// second from low to high: 2GiB/s.
func Rate(v *int64, words map[string]int64, low, high int64) pflag.Value {
	const perSecond = "/s"
	names := slices.Sorted(maps.Keys(words))
	format := func(n int64) string {
		for word, number := range words {
			if number == n {
				return word
			}
		}
		return FormatSize(n) + perSecond
	}
	size := ranged(v, low, high, "", ", such as 2GiB/s", func(text string) (int64, error) {
		size, timed := strings.CutSuffix(text, perSecond)
		if !timed {
			return 0, errors.New("not a rate")
		}
		return ParseSize(size)
	}, format)
	return &value{strings.Join(names, "|") + "|size/s", size.String, func(text string) error {
		if number, ok := words[text]; ok {
			*v = number
			return nil
		}
		if err := size.Set(text); err != nil {
			return errors.New(strings.Replace(err.Error(), ":", ": "+strings.Join(names, ", ")+", or", 1))
		}
		return nil
	}}
}

// Duration returns the value of a duration from low to high, such as 500ms or 30s.
func Duration(v *time.Duration, low, high time.Duration) pflag.Value {
	return ranged(v, low, high, "duration", ", such as 500ms or 30s", time.ParseDuration, time.Duration.String)
}

// Count returns the value of a whole number from low to high.
func Count(v *int, low, high int) pflag.Value {
	return ranged(v, low, high, "number", "", strconv.Atoi, strconv.Itoa)
}

// Choice returns the value of one of the allowed words.
func Choice(v *string, allowed []string) pflag.Value {
	return &value{strings.Join(allowed, "|"), func() string { return *v }, func(text string) error {
		if !slices.Contains(allowed, text) {
			return fmt.Errorf("allowed: %s", strings.Join(allowed, ", "))
		}
		*v = text
		return nil
	}}
}

// list returns the value of a list, separated by commas. Setting it replaces it.
func list[T any](v *[]T, kind string, parse func(part string) (T, error)) pflag.Value {
	format := func() string {
		parts := make([]string, len(*v))
		for i, one := range *v {
			parts[i] = fmt.Sprint(one)
		}
		return strings.Join(parts, ",")
	}
	return &value{kind, format, func(text string) error {
		var out []T
		for part := range strings.SplitSeq(text, ",") {
			if part = strings.TrimSpace(part); part == "" {
				continue
			}
			one, err := parse(part)
			if err != nil {
				return err
			}
			out = append(out, one)
		}
		*v = out
		return nil
	}}
}

// IDs returns the value of user or group numbers, separated by commas.
func IDs(v *[]uint32) pflag.Value {
	return list(v, "ids", func(part string) (uint32, error) {
		n, err := strconv.ParseUint(part, 10, 32)
		if err != nil {
			err = fmt.Errorf("%q, allowed: numbers from 0 to %d, separated by commas", part, uint32(math.MaxUint32))
		}
		return uint32(n), err
	})
}

// Names returns the value of a list of words, separated by commas.
func Names(v *[]string) pflag.Value {
	return list(v, "names", func(part string) (string, error) { return part, nil })
}

// sizeUnits are the units of sizes, the largest first.
var sizeUnits = []struct {
	name  string
	bytes int64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}}

// ParseSize reads a size with or without a unit.
func ParseSize(text string) (int64, error) {
	text = strings.TrimSpace(text)
	unit := int64(1)
	for _, u := range sizeUnits {
		if rest, ok := strings.CutSuffix(text, u.name); ok {
			text, unit = strings.TrimSpace(rest), u.bytes
			break
		}
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(n) || n < 0 || n*float64(unit) >= math.MaxInt64 {
		return 0, errors.New("not a size")
	}
	if whole, err := strconv.ParseInt(text, 10, 64); err == nil {
		return whole * unit, nil
	}
	return int64(n * float64(unit)), nil
}

// FormatSize returns the shortest exact form of a size.
func FormatSize(n int64) string {
	for _, u := range sizeUnits {
		if n >= u.bytes && n%u.bytes == 0 && u.bytes > 1 {
			return strconv.FormatInt(n/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(n, 10)
}

// HumanSize returns a rounded size with a unit.
func HumanSize(n int64) string {
	for _, u := range sizeUnits {
		if n >= u.bytes && u.bytes > 1 {
			return fmt.Sprintf("%.1f %s", float64(n)/float64(u.bytes), u.name)
		}
	}
	return fmt.Sprintf("%d B", n)
}

// Thousands returns a number with commas.
func Thousands(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// The Python package has the same rules (python/kvagent/socketdir.py).

const (
	systemSocketDir = "/run/kvagent"
	// maxSocketDir is in bytes: the kernel allows 107 for the path of a socket, such as
	// session.sock in the directory.
	maxSocketDir = 107 - len("/session.sock")
)

// DefaultSocketDir returns the directory that the agent and its clients use if none is named:
// /run/kvagent if it exists or this user is root, else kvagent in XDG_RUNTIME_DIR, else
// /tmp/kvagent-UID.
func DefaultSocketDir() string {
	if _, err := os.Stat(systemSocketDir); err == nil || os.Geteuid() == 0 {
		return systemSocketDir
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "kvagent")
	}
	return temporarySocketDir()
}

// temporarySocketDir lies where every user may create files.
func temporarySocketDir() string { return "/tmp/kvagent-" + strconv.Itoa(os.Geteuid()) }

// AddSocketDir defines --socket-dir, which Fill checks; dir has the default.
func AddSocketDir(f *pflag.FlagSet, dir *string, usage string) {
	f.Var((*socketDirValue)(dir), "socket-dir", usage)
}

type socketDirValue string

func (v *socketDirValue) Set(text string) error {
	*v = socketDirValue(text)
	return nil
}

func (v *socketDirValue) Type() string   { return "string" }
func (v *socketDirValue) String() string { return string(*v) }

// check refuses a directory in which no socket can be, and a temporary one that another user made,
// or a link, which would lead to a place that another user chose.
func (v *socketDirValue) check() error {
	if *v == "" {
		return fmt.Errorf(`socket-dir: "", allowed: a directory`)
	}
	dir, err := filepath.Abs(string(*v))
	if err != nil {
		return fmt.Errorf("socket-dir: %w", err)
	}
	if len(dir) > maxSocketDir {
		return fmt.Errorf("socket-dir: %q, %d bytes, allowed: 1 to %d", dir, len(dir), maxSocketDir)
	}
	var st unix.Stat_t
	if dir != temporarySocketDir() || errors.Is(unix.Lstat(dir, &st), unix.ENOENT) {
		return nil
	}
	if uid := os.Geteuid(); st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != uid {
		return fmt.Errorf("socket-dir: %q, a link or of user %d, allowed: a directory of user %d", dir, st.Uid, uid)
	}
	return nil
}
