package ipc

import "crypto/sha256"

// AppendIdentity appends the canonical identity of the space that m registers for: the msgpack
// [identity, shards, hash_tokens, [[block_tokens, window], ...]] of docs/PROTOCOL.md.
func (m *Register) AppendIdentity(dst []byte) []byte {
	dst = appendArray(dst, 4)
	dst = appendArray(dst, len(m.Identity))
	for _, p := range m.Identity {
		dst = appendStr(appendStr(appendArray(dst, 2), p.Key), p.Value)
	}
	dst = appendUint(dst, uint64(m.Shards))
	dst = appendUint(dst, uint64(m.HashTokens))
	dst = appendArray(dst, len(m.Groups))
	for _, g := range m.Groups {
		dst = appendUint(appendUint(appendArray(dst, 2), uint64(g.BlockTokens)), uint64(g.Window))
	}
	return dst
}

// Space is the fingerprint of that identity.
func (m *Register) Space() (space [16]byte) {
	sum := sha256.Sum256(m.AppendIdentity(nil))
	copy(space[:], sum[:])
	return space
}
