//go:build cuda

package cudaipc

import "github.com/kvagent/kvagent/cudaipc/driver"

func (l *lane) kernels() bool { return false }

func (l *lane) sendKernel(list *driver.List) error { return l.stream.Each(list, l.dir == Gather) }
