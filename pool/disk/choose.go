package disk

import (
	"math"

	"github.com/kvagent/kvagent/pool"
)

// choose is the directory of a key: that with the highest score of both, weighted by size (rendezvous hashing). So a directory that is
// added or lost moves only its own share of the keys, and the order of the directories does not matter; their names do.
func (s *Store) choose(k *pool.Key) *dir {
	if len(s.dirs) == 1 {
		return s.dirs[0]
	}
	b := keyBytes(k)
	h := stableHash(b[:])
	var best *dir
	score := math.Inf(-1)
	for _, d := range s.dirs {
		u := (float64(mix(h^d.salt)>>11) + 0.5) / (1 << 53) // between 0 and 1
		if v := -d.weight / math.Log(u); v > score {
			best, score = d, v
		}
	}
	return best
}

const keySize = 16 + 3 + pool.MaxHashLen

func keyBytes(k *pool.Key) (b [keySize]byte) {
	copy(b[:16], k.Space[:])
	b[16], b[17], b[18] = k.Group, k.Shard, k.Hash.Len
	copy(b[19:], k.Hash.Bytes[:])
	return b
}

// stableHash is the same in every process (FNV-1a).
func stableHash(p []byte) uint64 {
	h := uint64(14695981039346656037)
	for _, c := range p {
		h = (h ^ uint64(c)) * 1099511628211
	}
	return h
}

// mix spreads every bit over all (the finaliser of SplitMix64).
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
