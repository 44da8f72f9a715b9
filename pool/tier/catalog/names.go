package catalog

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/kvagent/kvagent/pool"
)

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
