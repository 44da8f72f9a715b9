package agent

import (
	"os"
	"testing"
)

// A low limit of open files leaves some to everybody.
func TestShareOfDescriptors(t *testing.T) {
	for _, c := range []struct {
		files    uint64
		sessions int
		want     share
	}{
		{1 << 20, 1024, share{1024, maxPendingFDs, maxLookupPeers}},
		{1<<64 - 1, 2048, share{2048, maxPendingFDs, maxLookupPeers}}, // no limit
		{1024, 1024, share{140, 224, 112}},
		{256, 1024, share{20, 32, 16}},
		{0, 1024, share{1, 1, 1}},
	} {
		got := shareOf(c.files, c.sessions)
		if got != c.want {
			t.Errorf("%d files: %+v, want %+v", c.files, got, c.want)
		}
		if need := int64(got.sessions)*sessionDescriptors + got.pending + got.peers +
			ownDescriptors; c.files > ownDescriptors && uint64(need) > c.files {
			t.Errorf("%d files: %+v may take %d", c.files, got, need)
		}
	}
}

func TestMapCount(t *testing.T) {
	for text, want := range map[string]int{"262144\n": 262144, "": usualMapCount, "x": usualMapCount,
		"-1\n": usualMapCount} {
		if got := mapCount([]byte(text), nil); got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
	if got := mapCount(nil, os.ErrNotExist); got != usualMapCount {
		t.Errorf("no file: %d", got)
	}
}
