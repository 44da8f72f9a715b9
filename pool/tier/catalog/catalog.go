// Package catalog defines what spaces are called in tiers and by which values in shared stores
// nodes agree on the names. It keeps both in a file for the agent's next process. It has no
// goroutines and calls no store.
package catalog

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
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

// MaxSpaces bounds the spaces whose epochs are kept. Beyond it those that are not open are dropped.
const MaxSpaces = 1 << 16

// Nonce tells resets that made the same epoch apart.
type Nonce [16]byte

// NewNonce returns a random nonce.
func NewNonce() (n Nonce) {
	_, _ = rand.Read(n[:]) // never fails
	return n
}

// MarshalText implements encoding.TextMarshaler: hex.
func (n Nonce) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, n[:]), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (n *Nonce) UnmarshalText(text []byte) error { return decode16((*[16]byte)(n), string(text)) }

func decode16(to *[16]byte, text string) error {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(to) {
		return fmt.Errorf("%q, allowed: 32 hex digits", text)
	}
	copy(to[:], b)
	return nil
}

// Space is the state of a space that was reset.
type Space struct {
	Epoch uint64 `json:"epoch"` // 0: never reset
	// Claim is of this node's reset that made the epoch, until all shared tiers know it; else zero.
	Claim     Nonce    `json:"claim,omitzero"`
	Confirmed []string `json:"told,omitempty"` // tiers that know the claim
	// Forget means that memory that outlives the process may have what was stored before Epoch.
	Forget bool `json:"forget,omitempty"`
}

// Catalog is what outlives the agent's process.
type Catalog struct {
	Spaces map[pool.Fingerprint]Space
	Floor  uint64 // the epoch of spaces that are not in Spaces: no space that was dropped had a later one
}

// New returns an empty catalog.
func New() *Catalog { return &Catalog{Spaces: make(map[pool.Fingerprint]Space)} }

// Clone returns a deep copy.
func (k *Catalog) Clone() *Catalog { return &Catalog{Spaces: maps.Clone(k.Spaces), Floor: k.Floor} }

// Of returns the state of a space.
func (k *Catalog) Of(fp pool.Fingerprint) Space {
	if e, ok := k.Spaces[fp]; ok {
		return e
	}
	return Space{Epoch: k.Floor}
}

// Put records the state of a space. A full catalog keeps no others than those in open, and those
// that makeRoom does not drop.
func (k *Catalog) Put(fp pool.Fingerprint, e Space, open []pool.Fingerprint) {
	if _, there := k.Spaces[fp]; !there && len(k.Spaces) >= MaxSpaces {
		k.makeRoom(open)
	}
	k.Spaces[fp] = e
}

// makeRoom drops all spaces that are neither open, nor to be forgotten by memory, nor still to be
// told to a tier. So that none returns to a name that was reset, Floor rises to the last epoch of
// them. Open spaces keep their names.
func (k *Catalog) makeRoom(open []pool.Fingerprint) {
	for _, fp := range open {
		k.Spaces[fp] = k.Of(fp)
	}
	for fp, e := range k.Spaces {
		if !e.Forget && e.Claim == (Nonce{}) && !slices.Contains(open, fp) {
			k.Floor = max(k.Floor, e.Epoch)
			delete(k.Spaces, fp)
		}
	}
}

// The file is JSON: a format, the checksum of the state as written, and the state.
const fileFormat = 4

type storedFile struct {
	Format int             `json:"format"`
	Sum    string          `json:"sum"` // CRC-32C of state, hex
	State  json.RawMessage `json:"state"`
}

type storedState struct {
	Floor  uint64           `json:"floor"`
	Spaces map[string]Space `json:"spaces"` // by fingerprint, hex
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
	k, last := New(), state.Floor
	k.Floor = state.Floor
	for text, e := range state.Spaces {
		var fp pool.Fingerprint
		if err := decode16((*[16]byte)(&fp), text); err != nil {
			return nil, fmt.Errorf("space: %w", err)
		}
		k.Spaces[fp], last = e, max(last, e.Epoch)
	}
	if last > MaxEpoch {
		return nil, fmt.Errorf("epoch: %d, allowed: 0 to %d", last, uint64(MaxEpoch))
	}
	return k, nil
}

// sumOf returns the checksum of a state without white space between its parts.
func sumOf(state json.RawMessage) string {
	compact, err := json.Marshal(state)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%08x", crc32.Checksum(compact, sumTable))
}

// Encode returns the text of the file.
func (k *Catalog) Encode() ([]byte, error) {
	s := storedState{Floor: k.Floor, Spaces: make(map[string]Space, len(k.Spaces))}
	for fp, e := range k.Spaces {
		s.Spaces[hex.EncodeToString(fp[:])] = e
	}
	state, err := json.Marshal(s)
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

// MaxEpoch bounds tier epochs: a marker's number has 32 bits of it that are looked for.
const MaxEpoch = 1<<32 - 1

// StoredName returns the name of a space in the tiers in an epoch: its fingerprint in epoch 0,
// otherwise SHA-256(fingerprint, epoch)[:16], the epoch as 8 bytes, little-endian.
func StoredName(fp pool.Fingerprint, epoch uint64) pool.Fingerprint {
	if epoch == 0 {
		return fp
	}
	sum := sha256.Sum256(binary.LittleEndian.AppendUint64(fp[:], epoch))
	return pool.Fingerprint(sum[:16])
}

// Above returns the epochs whose markers a node in epoch n asks for.
func Above(n uint64) (all []uint64) {
	for n++; n <= MaxEpoch; n += n & -n {
		all = append(all, n)
	}
	return all
}

// Below returns the epochs whose markers a node in epoch n keeps in the store.
func Below(n uint64) (all []uint64) {
	for ; n > 0; n -= n & -n {
		all = append(all, n)
	}
	return all
}

// MarkerKey returns the key of an epoch's marker.
func MarkerKey(fp pool.Fingerprint, epoch uint64) pool.Key {
	return pool.Key{Space: pool.EpochMarkers, Hash: pool.MakeHash(binary.BigEndian.AppendUint64(fp[:], epoch))}
}
