package tierspec

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/kvagent/kvagent/pool/remote"
)

// TestChangesOfStateDoNotFillTheLog: a server decides how often its store is lost, and why.
func TestChangesOfStateDoNotFillTheLog(t *testing.T) {
	var log bytes.Buffer
	lines := zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig())
	core := zapcore.NewCore(lines, zapcore.AddSync(&log), zap.InfoLevel)
	onState := (&Needs{Log: zap.New(core)}).onState("s3")
	for range 10_000 {
		onState(remote.OK, remote.Lost, errors.New(strings.Repeat("x", 16<<10)))
		onState(remote.Lost, remote.OK, nil)
	}
	n := strings.Count(log.String(), "\n")
	if n < 2 || n > 2*maxChanges || log.Len() > 2*maxChanges*(maxReason+256) { // two minutes at most
		t.Errorf("%d lines of %d bytes", n, log.Len())
	}
	if first, _, _ := strings.Cut(log.String(), "\n"); !strings.Contains(first, `"to":"lost"`) {
		t.Errorf("the first change is not logged: %s", first)
	}
}
