// Package catalog says what spaces are called in tiers, by which values in shared stores nodes agree
// on that, and keeps both for the next life of an agent. It has no goroutines and calls no store.
package catalog

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/kvagent/kvagent/pool"
)

// Bounds of what is kept. None of them is ever a refusal: what is beyond one takes the place of
// what is needed least.
const (
	MaxSpaces    = 1 << 16 // spaces whose epochs are kept
	MaxLeftovers = 1 << 14 // names waiting to be collected
)

// Nonce tells resets apart that made the same epoch.
type Nonce [16]byte

// NewNonce is a random one.
func NewNonce() (n Nonce, err error) {
	_, err = rand.Read(n[:])
	return n, err
}

// Space is what is kept of a space: that it was reset, or is private.
type Space struct {
	Epoch   uint64   // 0: it was never reset
	Claim   Nonce    // of this node's reset that made the epoch, as long as a shared tier may not know it; zero: none
	Told    []string // tiers that know the claim
	Private bool     // no other engine than its own will ever be of it
	Named   bool     // it is collected when no node uses it
	Used    int64    // when it was last opened or reset, Unix seconds; a named one in use: once a period
	Seen    int64    // when another node was last seen to use it, Unix seconds; 0: not since it was retired
}

// Leftover is a name in the tiers that nobody uses any more.
type Leftover struct {
	Space   pool.Fingerprint // whose name it was
	Epoch   uint64           // in which
	Private bool             // the space is gone as a whole
	Local   bool             // other nodes may use the name: looked for in local tiers alone
	Unused  bool             // no node uses it: looked for in a shared tier as long as that has no use marks
	Due     int64            // when the first look for it may begin, Unix milliseconds
	Tiers   map[string]Looks
}

// Looks is how far a leftover is in one tier.
type Looks struct {
	N    int   // looks that came to their end
	Next int64 // when the next one may begin, Unix milliseconds
	// clear is when the use marks of an unused space were first seen to be missing, Unix
	// milliseconds; 0: not yet.
	Clear int64
}

// Catalog is what outlives the agent.
type Catalog struct {
	Spaces    map[pool.Fingerprint]Space
	Leftovers map[pool.Fingerprint]Leftover // by their name in the tiers
	Swept     map[string]int64              // by tier, when old use marks were last collected, Unix seconds
}

// New is an empty catalog.
func New() *Catalog {
	return &Catalog{
		Spaces: make(map[pool.Fingerprint]Space), Leftovers: make(map[pool.Fingerprint]Leftover),
		Swept: make(map[string]int64),
	}
}

// Clone is a copy that shares nothing with it.
func (k *Catalog) Clone() *Catalog {
	out := &Catalog{Spaces: maps.Clone(k.Spaces), Leftovers: maps.Clone(k.Leftovers), Swept: maps.Clone(k.Swept)}
	for name, left := range out.Leftovers {
		left.Tiers = maps.Clone(left.Tiers)
		out.Leftovers[name] = left
	}
	return out
}

// The file is JSON: a format, the sum of the state as it stands there, and the state. Format 1 had
// none of these: it was an object of spaces and the random salts that a reset gave them. What a
// former version of format 2 does not know (named, seen, unused, swept) it forgets, and collects
// none of it.
const keptFormat = 2

type keptFile struct {
	Format int             `json:"format"`
	Sum    string          `json:"sum"` // CRC-32C of state, hex
	State  json.RawMessage `json:"state"`
}

type keptState struct {
	Spaces  []keptSpace    `json:"spaces"`
	Collect []keptLeftover `json:"collect"`
	// Unused is more to collect, as long as no node uses it.
	Unused []keptLeftover   `json:"unused,omitempty"`
	Swept  map[string]int64 `json:"swept,omitempty"`
}

type keptSpace struct {
	Space   string   `json:"space"`
	Epoch   uint64   `json:"epoch"`
	Claim   string   `json:"claim,omitempty"`
	Told    []string `json:"told,omitempty"`
	Private bool     `json:"private,omitempty"`
	Named   bool     `json:"named,omitempty"`
	Used    int64    `json:"used"`
	Seen    int64    `json:"seen,omitempty"`
}

type keptLeftover struct {
	Name    string              `json:"name"`
	Space   string              `json:"space"`
	Epoch   uint64              `json:"epoch"`
	Private bool                `json:"private,omitempty"`
	Local   bool                `json:"local,omitempty"`
	Due     int64               `json:"due"`
	Tiers   map[string][3]int64 `json:"tiers,omitempty"` // looks, when the next may begin, and when clear
}

var keptTable = crc32.MakeTable(crc32.Castagnoli)

// Read reads the file; one that is not there is empty. A damaged one is an error: to guess
// would mean to find what was reset.
func Read(path string) (*Catalog, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return New(), nil
	}
	if err != nil {
		return nil, fmt.Errorf("tier: resets: %w", err)
	}
	k, err := Parse(text)
	if err != nil {
		return nil, fmt.Errorf("tier: resets: %s: %w "+
			"(what was reset cannot be told any more: remove the file only together with what the tiers hold)", path, err)
	}
	return k, nil
}

// Parse is what a file of that text keeps.
func Parse(text []byte) (*Catalog, error) {
	var f keptFile
	if err := json.Unmarshal(text, &f); err != nil {
		return nil, err
	}
	if f.Format == 0 && f.State == nil {
		return parseSalts(text)
	}
	if f.Format != keptFormat {
		return nil, fmt.Errorf("format %d, allowed: %d", f.Format, keptFormat)
	}
	var state keptState
	if err := json.Unmarshal(f.State, &state); err != nil {
		return nil, err
	}
	if sum := sumOf(f.State); sum != f.Sum {
		return nil, fmt.Errorf("sum %q, and that of the state is %s", f.Sum, sum)
	}
	return state.kept()
}

// sumOf is the sum of a state without the white space between its parts.
func sumOf(state json.RawMessage) string {
	compact, err := json.Marshal(state)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%08x", crc32.Checksum(compact, keptTable))
}

func parse16(what, text string) (out [16]byte, err error) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(out) {
		return out, fmt.Errorf("%s: %q, allowed: 32 hex digits", what, text)
	}
	return [16]byte(b), nil
}

// parseSalts reads format 1: a space that has a salt was reset by this node, and what it has under
// that salt's name is left over.
func parseSalts(text []byte) (*Catalog, error) {
	var lines map[string]string
	if err := json.Unmarshal(text, &lines); err != nil {
		return nil, err
	}
	k := New()
	for space, value := range lines {
		fp, errA := parse16("space", space)
		salt, errB := parse16("salt", value)
		claim, errC := NewNonce()
		if err := errors.Join(errA, errB, errC); err != nil {
			return nil, err
		}
		k.Spaces[fp] = Space{Epoch: 1, Claim: claim}
		k.Leftovers[Hashed(fp, salt[:])] = Leftover{Space: fp, Tiers: map[string]Looks{}}
		k.Leftovers[fp] = Leftover{Space: fp, Tiers: map[string]Looks{}}
	}
	return k, nil
}

func (s *keptState) kept() (*Catalog, error) {
	k := New()
	for i := range s.Spaces {
		in := &s.Spaces[i]
		fp, err := parse16("space", in.Space)
		if err != nil {
			return nil, err
		}
		e := Space{Epoch: in.Epoch, Told: in.Told, Private: in.Private, Named: in.Named, Used: in.Used, Seen: in.Seen}
		if in.Claim != "" {
			if e.Claim, err = parse16("claim", in.Claim); err != nil {
				return nil, err
			}
		}
		if e.Epoch > MaxEpoch {
			return nil, fmt.Errorf("epoch: %d, allowed: 0 to %d", e.Epoch, uint64(MaxEpoch))
		}
		k.Spaces[fp] = e
	}
	for i, in := range slices.Concat(s.Collect, s.Unused) {
		unused := i >= len(s.Collect)
		name, errA := parse16("name", in.Name)
		fp, errB := parse16("space", in.Space)
		if err := errors.Join(errA, errB); err != nil {
			return nil, err
		}
		left := Leftover{Space: fp, Epoch: in.Epoch, Private: in.Private, Local: in.Local, Unused: unused, Due: in.Due}
		left.Tiers = make(map[string]Looks, len(in.Tiers))
		for tier, done := range in.Tiers {
			left.Tiers[tier] = Looks{N: int(done[0]), Next: done[1], Clear: done[2]}
		}
		k.Leftovers[name] = left
	}
	maps.Copy(k.Swept, s.Swept)
	return k, nil
}

func (k *Catalog) state() *keptState {
	s := &keptState{Spaces: []keptSpace{}, Collect: []keptLeftover{}, Swept: k.Swept}
	for _, fp := range sorted(k.Spaces) {
		e := k.Spaces[fp]
		out := keptSpace{Epoch: e.Epoch, Told: e.Told, Private: e.Private, Named: e.Named, Used: e.Used, Seen: e.Seen}
		out.Space = hex.EncodeToString(fp[:])
		if e.Claim != (Nonce{}) {
			out.Claim = hex.EncodeToString(e.Claim[:])
		}
		s.Spaces = append(s.Spaces, out)
	}
	for _, name := range sorted(k.Leftovers) {
		left := k.Leftovers[name]
		out := keptLeftover{
			Name: hex.EncodeToString(name[:]), Space: hex.EncodeToString(left.Space[:]),
			Epoch: left.Epoch, Private: left.Private, Local: left.Local, Due: left.Due,
			Tiers: make(map[string][3]int64, len(left.Tiers)),
		}
		for tier, done := range left.Tiers {
			out.Tiers[tier] = [3]int64{int64(done.N), done.Next, done.Clear}
		}
		if left.Unused {
			s.Unused = append(s.Unused, out)
		} else {
			s.Collect = append(s.Collect, out)
		}
	}
	return s
}

func sorted[V any](m map[pool.Fingerprint]V) []pool.Fingerprint {
	return slices.SortedFunc(maps.Keys(m), func(a, b pool.Fingerprint) int { return slices.Compare(a[:], b[:]) })
}

// Encode is the text of the file.
func (k *Catalog) Encode() ([]byte, error) {
	state, err := json.Marshal(k.state())
	if err != nil {
		return nil, err
	}
	text, err := json.MarshalIndent(&keptFile{Format: keptFormat, Sum: sumOf(state), State: state}, "", " ")
	return append(text, '\n'), err
}

// Write replaces the file, so that after a crash it is the old one or the new one.
func Write(path string, k *Catalog) error {
	text, err := k.Encode()
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".resets-")
	if err != nil {
		return fmt.Errorf("tier: resets: %w", err)
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err == nil {
		err = syncDir(filepath.Dir(path))
	}
	if err != nil {
		return fmt.Errorf("tier: resets: %w", errors.Join(err, removed(f.Name())))
	}
	return nil
}

// removed takes a half-written file away; one that was renamed is not there.
func removed(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
