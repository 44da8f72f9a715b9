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

// Size returns the value of a setting in bytes, from low to high, with a unit: 4GiB, 512MiB,
// 1048576.
func Size(v *int64, low, high int64) pflag.Value { return &sizeValue{v, low, high} }

// Rate returns the value of a setting that is one of some words, each with its number, or bytes per
// second from low to high: 2GiB/s.
func Rate(v *int64, words map[string]int64, low, high int64) pflag.Value {
	return &rateValue{v, words, low, high}
}

// Duration returns the value of a duration from low to high, such as 500ms or 30s.
func Duration(v *time.Duration, low, high time.Duration) pflag.Value {
	return &durationValue{v, low, high}
}

// Count returns the value of a whole number from low to high.
func Count(v *int, low, high int) pflag.Value { return &countValue{v, low, high} }

// Choice returns the value of one of the allowed words.
func Choice(v *string, allowed []string) pflag.Value { return &choiceValue{v, allowed} }

// IDs returns the value of user or group numbers, separated by commas.
func IDs(v *[]uint32) pflag.Value { return &idsValue{v} }

// Names returns the value of a list of words, separated by commas.
func Names(v *[]string) pflag.Value { return &namesValue{v} }

// sizeValue is bytes with a unit: 4GiB, 512MiB, 1048576.
type sizeValue struct {
	v         *int64
	low, high int64
}

func (s *sizeValue) Type() string { return "size" }
func (s *sizeValue) String() string {
	if s.v == nil {
		return ""
	}
	return FormatSize(*s.v)
}

func (s *sizeValue) Set(text string) error {
	n, err := ParseSize(text)
	if err != nil || n < s.low || n > s.high {
		return fmt.Errorf("allowed: %s to %s, such as 4GiB, 512MiB or a number of bytes", FormatSize(s.low),
			FormatSize(s.high))
	}
	*s.v = n
	return nil
}

// rateValue is a word, or bytes per second with a unit: 2GiB/s, 500MiB/s.
type rateValue struct {
	v         *int64
	words     map[string]int64
	low, high int64
}

func (r *rateValue) Type() string {
	return strings.Join(slices.Sorted(maps.Keys(r.words)), "|") + "|size/s"
}
func (r *rateValue) String() string {
	if r.v == nil {
		return ""
	}
	for word, number := range r.words {
		if number == *r.v {
			return word
		}
	}
	return FormatSize(*r.v) + perSecond
}

const perSecond = "/s"

func (r *rateValue) Set(text string) error {
	if number, ok := r.words[text]; ok {
		*r.v = number
		return nil
	}
	size, timed := strings.CutSuffix(text, perSecond)
	n, err := ParseSize(size)
	if err != nil || !timed || n < r.low || n > r.high {
		words := strings.Join(slices.Sorted(maps.Keys(r.words)), ", ")
		return fmt.Errorf("allowed: %s, or %s%s to %s%s, such as 2GiB/s", words, FormatSize(r.low), perSecond,
			FormatSize(r.high), perSecond)
	}
	*r.v = n
	return nil
}

// durationValue is a time such as 500ms or 30s.
type durationValue struct {
	v         *time.Duration
	low, high time.Duration
}

func (d *durationValue) Type() string { return "duration" }
func (d *durationValue) String() string {
	if d.v == nil {
		return ""
	}
	return d.v.String()
}

func (d *durationValue) Set(text string) error {
	v, err := time.ParseDuration(text)
	if err != nil || v < d.low || v > d.high {
		return fmt.Errorf("allowed: %v to %v, such as 500ms or 30s", d.low, d.high)
	}
	*d.v = v
	return nil
}

// countValue is a whole number.
type countValue struct {
	v         *int
	low, high int
}

func (c *countValue) Type() string { return "number" }
func (c *countValue) String() string {
	if c.v == nil {
		return ""
	}
	return strconv.Itoa(*c.v)
}

func (c *countValue) Set(text string) error {
	n, err := strconv.Atoi(text)
	if err != nil || n < c.low || n > c.high {
		return fmt.Errorf("allowed: %d to %d", c.low, c.high)
	}
	*c.v = n
	return nil
}

// choiceValue is one of the allowed words.
type choiceValue struct {
	v       *string
	allowed []string
}

func (c *choiceValue) Type() string { return strings.Join(c.allowed, "|") }
func (c *choiceValue) String() string {
	if c.v == nil {
		return ""
	}
	return *c.v
}

func (c *choiceValue) Set(text string) error {
	if !slices.Contains(c.allowed, text) {
		return fmt.Errorf("allowed: %s", strings.Join(c.allowed, ", "))
	}
	*c.v = text
	return nil
}

// idsValue is a list of user or group numbers, separated by commas. Setting it replaces it.
type idsValue struct{ v *[]uint32 }

func (l *idsValue) Type() string { return "ids" }
func (l *idsValue) String() string {
	if l.v == nil {
		return ""
	}
	out := make([]string, len(*l.v))
	for i, n := range *l.v {
		out[i] = strconv.FormatUint(uint64(n), 10)
	}
	return strings.Join(out, ",")
}

func (l *idsValue) Set(text string) error {
	var out []uint32
	for _, part := range strings.Split(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		n, err := strconv.ParseUint(part, 10, 32)
		if err != nil {
			return fmt.Errorf("%q, allowed: numbers from 0 to %d, separated by commas", part, uint32(math.MaxUint32))
		}
		out = append(out, uint32(n))
	}
	*l.v = out
	return nil
}

// namesValue is a list of words, separated by commas. Setting it replaces it.
type namesValue struct{ v *[]string }

func (n *namesValue) Type() string { return "names" }
func (n *namesValue) String() string {
	if n.v == nil {
		return ""
	}
	return strings.Join(*n.v, ",")
}

func (n *namesValue) Set(text string) error {
	*n.v = nil
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			*n.v = append(*n.v, part)
		}
	}
	return nil
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
