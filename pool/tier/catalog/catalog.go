// Package catalog defines what spaces are called in tiers and by which values in shared stores
// nodes agree on the names. It keeps both in a file for the agent's next process. It has no
// goroutines and calls no store.
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

// Bounds of a catalog. Reaching one is not an error: a new entry replaces the least needed one.
const (
	MaxSpaces  = 1 << 16 // spaces whose epochs are kept
	MaxOrphans = 1 << 14 // names waiting to be collected
)

// Nonce tells resets that made the same epoch apart.
type Nonce [16]byte

// NewNonce returns a random nonce.
func NewNonce() (n Nonce, err error) {
	_, err = rand.Read(n[:])
	return n, err
}

// Space is the state of a space that was reset, or is private or named.
type Space struct {
	Epoch     uint64   // 0: never reset
	Claim     Nonce    // of this node's reset that made the epoch, until all shared tiers know it; else zero
	Confirmed []string // tiers that know the claim
	Private   bool     // no other engine will ever use it
	Named     bool     // it is collected when no node uses it
	Forget    bool     // memory that outlives the process may have what was stored before Epoch
	Used      int64    // when last opened or reset, Unix seconds; updated once a period for a named one in use
	Seen      int64    // when another node was last found to use it, Unix seconds; 0: not since it was abandoned
}

// Orphan is a name in the tiers that no engine uses any more.
type Orphan struct {
	Space     pool.Fingerprint // of which it was the name
	Epoch     uint64           // in which it was the name
	Private   bool             // the whole space is to be collected
	Local     bool             // other nodes may use the name: only local tiers are scanned
	Unused    bool             // a shared tier is scanned only while it has no use marks
	NotBefore int64            // when the first scan may begin, Unix milliseconds
	Tiers     map[string]Scans
}

// Scans is the progress of an orphan's collection in one tier.
type Scans struct {
	N    int   // completed scans
	Next int64 // when the next may begin, Unix milliseconds
	// Clear is when the use marks of an unused space were first found missing, Unix milliseconds;
	// 0: not yet.
	Clear int64
}

// Catalog is what outlives the agent's process.
type Catalog struct {
	Spaces  map[pool.Fingerprint]Space
	Orphans map[pool.Fingerprint]Orphan // by their names in the tiers
	Swept   map[string]int64            // by tier, when old use marks were last collected, Unix seconds
}

// New returns an empty catalog.
func New() *Catalog {
	return &Catalog{
		Spaces: make(map[pool.Fingerprint]Space), Orphans: make(map[pool.Fingerprint]Orphan),
		Swept: make(map[string]int64),
	}
}

// Clone returns a deep copy.
func (k *Catalog) Clone() *Catalog {
	out := &Catalog{Spaces: maps.Clone(k.Spaces), Orphans: maps.Clone(k.Orphans), Swept: maps.Clone(k.Swept)}
	for name, left := range out.Orphans {
		left.Tiers = maps.Clone(left.Tiers)
		out.Orphans[name] = left
	}
	return out
}

// The file is JSON: a format, the checksum of the state as written, and the state. Format 1 was an
// object of spaces and the random salts of their resets. An older version of format 2 drops the
// fields that it does not know (named, seen, unused, swept) and collects none of them.
const fileFormat = 2

type storedFile struct {
	Format int             `json:"format"`
	Sum    string          `json:"sum"` // CRC-32C of state, hex
	State  json.RawMessage `json:"state"`
}

type storedState struct {
	Spaces  []storedSpace  `json:"spaces"`
	Collect []storedOrphan `json:"collect"`
	// Unused is also to be collected, while no node uses it.
	Unused []storedOrphan   `json:"unused,omitempty"`
	Swept  map[string]int64 `json:"swept,omitempty"`
}

type storedSpace struct {
	Space     string   `json:"space"`
	Epoch     uint64   `json:"epoch"`
	Claim     string   `json:"claim,omitempty"`
	Confirmed []string `json:"told,omitempty"`
	Private   bool     `json:"private,omitempty"`
	Named     bool     `json:"named,omitempty"`
	Forget    bool     `json:"forget,omitempty"`
	Used      int64    `json:"used"`
	Seen      int64    `json:"seen,omitempty"`
}

type storedOrphan struct {
	Name    string              `json:"name"`
	Space   string              `json:"space"`
	Epoch   uint64              `json:"epoch"`
	Private bool                `json:"private,omitempty"`
	Local   bool                `json:"local,omitempty"`
	Due     int64               `json:"due"`
	Tiers   map[string][3]int64 `json:"tiers,omitempty"` // scans, when the next may begin, and Clear
}

var sumTable = crc32.MakeTable(crc32.Castagnoli)

// File is the path of a catalog's file.
type File string

// Read reads the file; a missing one is empty. A damaged one is an error, since a guess could make
// reset blocks findable again.
func (f File) Read() (*Catalog, error) {
	text, err := os.ReadFile(string(f))
	if errors.Is(err, fs.ErrNotExist) {
		return New(), nil
	}
	if err != nil {
		return nil, fmt.Errorf("tier: resets: %w", err)
	}
	k, err := Parse(text)
	if err != nil {
		return nil, fmt.Errorf("tier: resets: %s: %w "+
			"(what was reset is unknown: remove the file only together with the contents of the tiers)", string(f), err)
	}
	return k, nil
}

// Parse parses the text of a file.
func Parse(text []byte) (*Catalog, error) {
	var f storedFile
	if err := json.Unmarshal(text, &f); err != nil {
		return nil, err
	}
	if f.Format == 0 && f.State == nil {
		return parseSalts(text)
	}
	if f.Format != fileFormat {
		return nil, fmt.Errorf("format %d, allowed: %d", f.Format, fileFormat)
	}
	var state storedState
	if err := json.Unmarshal(f.State, &state); err != nil {
		return nil, err
	}
	if sum := sumOf(f.State); sum != f.Sum {
		return nil, fmt.Errorf("sum %q, and that of the state is %s", f.Sum, sum)
	}
	return state.catalog()
}

// sumOf returns the checksum of a state without white space between its parts.
func sumOf(state json.RawMessage) string {
	compact, err := json.Marshal(state)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%08x", crc32.Checksum(compact, sumTable))
}

func parse16(what, text string) (out [16]byte, err error) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(out) {
		return out, fmt.Errorf("%s: %q, allowed: 32 hex digits", what, text)
	}
	return [16]byte(b), nil
}

// parseSalts reads format 1. Each space in it was reset by this node; its name made of the salt is
// an orphan.
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
		k.Orphans[Hashed(fp, salt[:])] = Orphan{Space: fp, Tiers: map[string]Scans{}}
		k.Orphans[fp] = Orphan{Space: fp, Tiers: map[string]Scans{}}
	}
	return k, nil
}

func (s *storedState) catalog() (*Catalog, error) {
	k := New()
	for i := range s.Spaces {
		in := &s.Spaces[i]
		fp, err := parse16("space", in.Space)
		if err != nil {
			return nil, err
		}
		e := Space{Epoch: in.Epoch, Confirmed: in.Confirmed, Private: in.Private, Named: in.Named, Used: in.Used,
			Seen: in.Seen, Forget: in.Forget}
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
		left := Orphan{Space: fp, Epoch: in.Epoch, Private: in.Private, Local: in.Local, Unused: unused,
			NotBefore: in.Due}
		left.Tiers = make(map[string]Scans, len(in.Tiers))
		for tier, done := range in.Tiers {
			left.Tiers[tier] = Scans{N: int(done[0]), Next: done[1], Clear: done[2]}
		}
		k.Orphans[name] = left
	}
	maps.Copy(k.Swept, s.Swept)
	return k, nil
}

func (k *Catalog) state() *storedState {
	s := &storedState{Spaces: []storedSpace{}, Collect: []storedOrphan{}, Swept: k.Swept}
	for _, fp := range sorted(k.Spaces) {
		e := k.Spaces[fp]
		out := storedSpace{Epoch: e.Epoch, Confirmed: e.Confirmed, Private: e.Private, Named: e.Named, Used: e.Used,
			Seen: e.Seen, Forget: e.Forget}
		out.Space = hex.EncodeToString(fp[:])
		if e.Claim != (Nonce{}) {
			out.Claim = hex.EncodeToString(e.Claim[:])
		}
		s.Spaces = append(s.Spaces, out)
	}
	for _, name := range sorted(k.Orphans) {
		left := k.Orphans[name]
		out := storedOrphan{
			Name: hex.EncodeToString(name[:]), Space: hex.EncodeToString(left.Space[:]),
			Epoch: left.Epoch, Private: left.Private, Local: left.Local, Due: left.NotBefore,
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

// Encode returns the text of the file.
func (k *Catalog) Encode() ([]byte, error) {
	state, err := json.Marshal(k.state())
	if err != nil {
		return nil, err
	}
	text, err := json.MarshalIndent(&storedFile{Format: fileFormat, Sum: sumOf(state), State: state}, "", " ")
	return append(text, '\n'), err
}

// Write replaces the file atomically: after a crash it is the old one or the new one.
func (f File) Write(k *Catalog) error {
	text, err := k.Encode()
	if err != nil {
		return err
	}
	dir := filepath.Dir(string(f))
	next, err := os.CreateTemp(dir, ".resets-")
	if err != nil {
		return fmt.Errorf("tier: resets: %w", err)
	}
	_, err = next.Write(text)
	err = errors.Join(err, next.Sync(), next.Close())
	if err == nil {
		err = os.Rename(next.Name(), string(f))
	}
	if err == nil {
		err = syncDir(dir)
	}
	if err != nil {
		return fmt.Errorf("tier: resets: %w", errors.Join(err, removed(next.Name())))
	}
	return nil
}

// removed deletes a file that may be missing.
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
