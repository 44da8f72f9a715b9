package tier

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
	maxKept      = 1 << 16 // spaces whose epochs are kept
	maxLeftovers = 1 << 14 // names waiting to be collected
)

// nonce tells resets apart that made the same epoch.
type nonce [16]byte

func newNonce() (n nonce, err error) {
	_, err = rand.Read(n[:])
	return n, err
}

// epochOf is what is kept of a space: that it was reset, or is private.
type epochOf struct {
	epoch   uint64   // 0: it was never reset
	claim   nonce    // of this node's reset that made the epoch, as long as a shared tier may not know it; zero: none
	told    []string // tiers that know the claim
	private bool     // no other engine than its own will ever be of it
	named   bool     // it is collected when no node uses it
	used    int64    // when it was last opened or reset, Unix seconds; a named one in use: once a period
	seen    int64    // when another node was last seen to use it, Unix seconds; 0: not since it was retired
}

// leftover is a name in the tiers that nobody uses any more.
type leftover struct {
	space   pool.Fingerprint // whose name it was
	epoch   uint64           // in which
	private bool             // the space is gone as a whole
	local   bool             // other nodes may use the name: looked for in local tiers alone
	unused  bool             // no node uses it: looked for in a shared tier as long as that has no use marks
	due     int64            // when the first look for it may begin, Unix milliseconds
	tiers   map[string]looksDone
}

// looksDone is how far a leftover is in one tier.
type looksDone struct {
	n    int   // looks that came to their end
	next int64 // when the next one may begin, Unix milliseconds
	// clear is when the use marks of an unused space were first seen to be missing, Unix
	// milliseconds; 0: not yet.
	clear int64
}

// kept is what outlives the agent.
type kept struct {
	spaces    map[pool.Fingerprint]epochOf
	leftovers map[pool.Fingerprint]leftover // by their name in the tiers
	swept     map[string]int64              // by tier, when old use marks were last collected, Unix seconds
}

func newKept() *kept {
	return &kept{
		spaces: make(map[pool.Fingerprint]epochOf), leftovers: make(map[pool.Fingerprint]leftover),
		swept: make(map[string]int64),
	}
}

func (k *kept) clone() *kept {
	out := &kept{spaces: maps.Clone(k.spaces), leftovers: maps.Clone(k.leftovers), swept: maps.Clone(k.swept)}
	for name, left := range out.leftovers {
		left.tiers = maps.Clone(left.tiers)
		out.leftovers[name] = left
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

// readKept reads the file; one that is not there is empty. A damaged one is an error: to guess
// would mean to find what was reset.
func readKept(path string) (*kept, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return newKept(), nil
	}
	if err != nil {
		return nil, fmt.Errorf("tier: resets: %w", err)
	}
	k, err := parseKept(text)
	if err != nil {
		return nil, fmt.Errorf("tier: resets: %s: %w "+
			"(what was reset cannot be told any more: remove the file only together with what the tiers hold)", path, err)
	}
	return k, nil
}

func parseKept(text []byte) (*kept, error) {
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
func parseSalts(text []byte) (*kept, error) {
	var lines map[string]string
	if err := json.Unmarshal(text, &lines); err != nil {
		return nil, err
	}
	k := newKept()
	for space, value := range lines {
		fp, errA := parse16("space", space)
		salt, errB := parse16("salt", value)
		claim, errC := newNonce()
		if err := errors.Join(errA, errB, errC); err != nil {
			return nil, err
		}
		k.spaces[fp] = epochOf{epoch: 1, claim: claim}
		k.leftovers[hashed(fp, salt[:])] = leftover{space: fp, tiers: map[string]looksDone{}}
		k.leftovers[fp] = leftover{space: fp, tiers: map[string]looksDone{}}
	}
	return k, nil
}

func (s *keptState) kept() (*kept, error) {
	k := newKept()
	for i := range s.Spaces {
		in := &s.Spaces[i]
		fp, err := parse16("space", in.Space)
		if err != nil {
			return nil, err
		}
		e := epochOf{epoch: in.Epoch, told: in.Told, private: in.Private, named: in.Named, used: in.Used, seen: in.Seen}
		if in.Claim != "" {
			if e.claim, err = parse16("claim", in.Claim); err != nil {
				return nil, err
			}
		}
		if e.epoch > maxEpoch {
			return nil, fmt.Errorf("epoch: %d, allowed: 0 to %d", e.epoch, uint64(maxEpoch))
		}
		k.spaces[fp] = e
	}
	for i, in := range slices.Concat(s.Collect, s.Unused) {
		unused := i >= len(s.Collect)
		name, errA := parse16("name", in.Name)
		fp, errB := parse16("space", in.Space)
		if err := errors.Join(errA, errB); err != nil {
			return nil, err
		}
		left := leftover{space: fp, epoch: in.Epoch, private: in.Private, local: in.Local, unused: unused, due: in.Due}
		left.tiers = make(map[string]looksDone, len(in.Tiers))
		for tier, done := range in.Tiers {
			left.tiers[tier] = looksDone{n: int(done[0]), next: done[1], clear: done[2]}
		}
		k.leftovers[name] = left
	}
	maps.Copy(k.swept, s.Swept)
	return k, nil
}

func (k *kept) state() *keptState {
	s := &keptState{Spaces: []keptSpace{}, Collect: []keptLeftover{}, Swept: k.swept}
	for _, fp := range sorted(k.spaces) {
		e := k.spaces[fp]
		out := keptSpace{Epoch: e.epoch, Told: e.told, Private: e.private, Named: e.named, Used: e.used, Seen: e.seen}
		out.Space = hex.EncodeToString(fp[:])
		if e.claim != (nonce{}) {
			out.Claim = hex.EncodeToString(e.claim[:])
		}
		s.Spaces = append(s.Spaces, out)
	}
	for _, name := range sorted(k.leftovers) {
		left := k.leftovers[name]
		out := keptLeftover{
			Name: hex.EncodeToString(name[:]), Space: hex.EncodeToString(left.space[:]),
			Epoch: left.epoch, Private: left.private, Local: left.local, Due: left.due,
			Tiers: make(map[string][3]int64, len(left.tiers)),
		}
		for tier, done := range left.tiers {
			out.Tiers[tier] = [3]int64{int64(done.n), done.next, done.clear}
		}
		if left.unused {
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

func (k *kept) encode() ([]byte, error) {
	state, err := json.Marshal(k.state())
	if err != nil {
		return nil, err
	}
	text, err := json.MarshalIndent(&keptFile{Format: keptFormat, Sum: sumOf(state), State: state}, "", " ")
	return append(text, '\n'), err
}

// writeKept replaces the file, so that after a crash it is the old one or the new one.
func writeKept(path string, k *kept) error {
	text, err := k.encode()
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
