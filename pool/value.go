package pool

import (
	"encoding/hex"
	"strconv"
)

// MaxKeyText is the length of the longest Text of a key, bytes.
const MaxKeyText = 2*len(Fingerprint{}) +
	len("@pcp0@dcp0@head_or_tp_rank:255@pp_rank:0@group:255@cache_role:kv@cache_family:default@") + 2*MaxHashLen

// Text returns the name of a block's shard in stores that many nodes share: AscendStore's PoolKey,
// with the space's fingerprint in lower-case hex in place of the model's name, and the shard as
// head_or_tp_rank:
//
//	{fingerprint}@pcp0@dcp0@head_or_tp_rank:{shard}@pp_rank:0@group:{group}
//	    @cache_role:kv@cache_family:default@{hash}      (in one line)
//
// The fields that kvagent's fingerprint already covers (pcp, dcp, pp_rank, cache_role,
// cache_family) are constant. Different keys have different texts.
func (k *Key) Text() string { return string(k.AppendText(make([]byte, 0, MaxKeyText))) }

// AppendText appends Text to b.
func (k *Key) AppendText(b []byte) []byte {
	b = hex.AppendEncode(b, k.Space[:])
	b = append(b, "@pcp0@dcp0@head_or_tp_rank:"...)
	b = strconv.AppendUint(b, uint64(k.Shard), 10)
	b = append(b, "@pp_rank:0@group:"...)
	b = strconv.AppendUint(b, uint64(k.Group), 10)
	b = append(b, "@cache_role:kv@cache_family:default@"...)
	return hex.AppendEncode(b, k.Hash.Bytes[:k.Hash.Len])
}
