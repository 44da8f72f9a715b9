package bench

import (
	"encoding/json"
	"os"
	"testing"
)

func TestBenchRecover(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "kvagent-test-")
	if err != nil {
		t.Skipf("SKIPPED: no tmpfs on /dev/shm: %v", err)
	}
	defer os.RemoveAll(dir)
	out, code := benchOutput(t, "bench", "recover", "--json", "--slots", "20000", "--dir", dir)
	var r recoverReport
	if err := json.Unmarshal([]byte(out), &r); code != 0 || err != nil {
		t.Fatalf("exit %d, %v: %s", code, err, out)
	}
	if r.Slots < 20_000 || r.RecoveredRatio < 0.95 || r.RecoveredRatio > 1 || r.RecoverS <= 0 || r.Checked < 10_000 ||
		r.Wrong != 0 {
		t.Errorf("%+v", r)
	}
}
