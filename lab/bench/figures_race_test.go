//go:build race

package bench

import "testing"

func figures(t *testing.T) {
	t.Skip("a test of hits, rates and times: make test-figures runs it, without -race")
}
