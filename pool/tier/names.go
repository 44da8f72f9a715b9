package tier

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/kvagent/kvagent/pool"
)

// maxEpoch bounds tier epochs: a marker's number has 32 bits of it that are looked for.
const maxEpoch = 1<<32 - 1

// storedName is the name of a space in the tiers in an epoch: its fingerprint in epoch 0, and
// beyond SHA-256(fingerprint, epoch)[:16], the epoch as 8 bytes, little-endian.
func storedName(fp pool.Fingerprint, epoch uint64) pool.Fingerprint {
	if epoch == 0 {
		return fp
	}
	return hashed(fp, binary.LittleEndian.AppendUint64(nil, epoch))
}

func hashed(fp pool.Fingerprint, with []byte) pool.Fingerprint {
	sum := sha256.Sum256(append(fp[:], with...))
	return pool.Fingerprint(sum[:16])
}

func above(n uint64) (all []uint64) {
	for n++; n <= maxEpoch; n += n & -n {
		all = append(all, n)
	}
	return all
}

func below(n uint64) (all []uint64) {
	for ; n > 0; n -= n & -n {
		all = append(all, n)
	}
	return all
}

// markerKey is where the marker of an epoch lies.
func markerKey(fp pool.Fingerprint, epoch uint64) pool.Key {
	return pool.Key{Space: pool.EpochMarkers, Hash: pool.MakeHash(binary.BigEndian.AppendUint64(fp[:], epoch))}
}
