package pool

import (
	"testing"
)

func textKey() Key {
	k := Key{Group: 2, Shard: 13, Hash: MakeHash([]byte{0x9f, 0x86, 0xd0, 0x81})}
	for i := range k.Space {
		k.Space[i] = byte(i * 17)
	}
	return k
}

func TestKeyText(t *testing.T) {
	k := textKey()
	const (
		print = "00112233445566778899aabbccddeeff"
		tail  = "@cache_role:kv@cache_family:default@9f86d081"
		want  = print + "@pcp0@dcp0@head_or_tp_rank:13@pp_rank:0@group:2" + tail
	)
	if got := k.Text(); got != want {
		t.Errorf("text %q, want %q", got, want)
	}
	longest := Key{Group: 255, Shard: 255, Hash: MakeHash(make([]byte, MaxHashLen))}
	if n := len(longest.Text()); n != MaxKeyText {
		t.Errorf("the longest text has %d bytes, MaxKeyText is %d", n, MaxKeyText)
	}
}
