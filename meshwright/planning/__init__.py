"""What `mw.plan` does around a search: check the request, log remarks, explain a refusal for want of memory."""
