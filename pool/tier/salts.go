package tier

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/kvagent/kvagent/pool"
)

// salt is mixed into the name of a space in the tiers once it was reset; zero before.
type salt [16]byte

// maxSalts bounds the file: spaces that were ever reset on this node.
const maxSalts = pool.MaxSpaces

// readSalts reads the file of salts; one that is not there is empty. A damaged one is an error: to guess would mean to find what was reset.
func readSalts(path string) (map[pool.Fingerprint]salt, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return map[pool.Fingerprint]salt{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("tier: salts: %w", err)
	}
	var lines map[string]string
	if err := json.Unmarshal(text, &lines); err != nil {
		return nil, fmt.Errorf("tier: salts: %s: %w (what was reset cannot be told any more: remove the file only together with what the tiers hold)", path, err)
	}
	out := make(map[pool.Fingerprint]salt, len(lines))
	for space, value := range lines {
		a, errA := hex.DecodeString(space)
		b, errB := hex.DecodeString(value)
		if errA != nil || errB != nil || len(a) != 16 || len(b) != 16 {
			return nil, fmt.Errorf("tier: salts: %s: %q: %q, allowed: 32 hex digits each", path, space, value)
		}
		out[pool.Fingerprint(a)] = salt(b)
	}
	return out, nil
}

// writeSalts replaces the file, so that after a crash it is the old one or the new one.
func writeSalts(path string, salts map[pool.Fingerprint]salt) error {
	lines := make(map[string]string, len(salts))
	for space, value := range salts {
		lines[hex.EncodeToString(space[:])] = hex.EncodeToString(value[:])
	}
	text, err := json.MarshalIndent(lines, "", " ")
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".salts-")
	if err != nil {
		return fmt.Errorf("tier: salts: %w", err)
	}
	_, err = f.Write(append(text, '\n'))
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err == nil {
		err = syncDir(filepath.Dir(path))
	}
	if err != nil {
		return fmt.Errorf("tier: salts: %w", errors.Join(err, removed(f.Name())))
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

func newSalt() (s salt, err error) {
	_, err = rand.Read(s[:])
	return s, err
}
